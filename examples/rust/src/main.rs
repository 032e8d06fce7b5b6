//! Decodes a batch through an exported module, and compares the result with numbers of the oracle.
//!
//! ```text
//! mla-cupy export --op decode --h-q 16 --page-size 64 --arch sm_90a --rust --out build/decode
//! MLA_EXPORT=$PWD/build/decode cargo run --offline --manifest-path examples/rust/Cargo.toml --target-dir build/rust
//! ```

mod batch;
mod driver;

/// What the export wrote.
#[allow(dead_code)]
mod mla_decode {
    include!(env!("MLA_DECODE_RS"));
}

use batch::{BATCH, BLOCK_TABLE, HEADS, MAX_PAGES, PAGES, PAGE_SIZE, SEQLENS, VALUE_WIDTH, WIDTH};
use driver::Driver;
use mla_decode::{Args, Module};
use std::error::Error;
use std::process::ExitCode;

fn run() -> Result<usize, Box<dyn Error>> {
    let driver = Driver::start()?;
    let module = Module::open()?; // loads the kernels for the current context

    let mut args = Args {
        b: BATCH as i64,
        num_pages: PAGES as i64,
        max_pages: MAX_PAGES as i64,
        q: driver.copy_of(&batch::elements(BATCH * HEADS * WIDTH, 0))?,
        kv_cache: driver.copy_of(&batch::elements(PAGES * PAGE_SIZE * WIDTH, 1 << 20))?,
        block_table: driver.copy_of(&BLOCK_TABLE)?,
        seqlens: driver.copy_of(&SEQLENS)?,
        out: driver.memory(BATCH * HEADS * VALUE_WIDTH * size_of::<u16>())?,
        lse: driver.memory(BATCH * HEADS * size_of::<f32>())?,
        scale: 192f64.powf(-0.5), // DeepSeek-V3's
        ..Default::default()
    };
    args.contiguous();
    args.workspace_bytes = module.workspace(&args)?;
    args.workspace = driver.memory(args.workspace_bytes)?;

    let stream = std::ptr::null_mut(); // the default stream
    unsafe { module.call(&args, stream) }?;
    let (mut out, mut lse) = (vec![0u16; BATCH * HEADS * VALUE_WIDTH], vec![0f32; BATCH * HEADS]);
    driver.fetch(&mut out, args.out)?;
    driver.fetch(&mut lse, args.lse)?;
    let mut wrong = batch::wrong_results(&out, &lse);

    args.kv_cache = 0; // a mistake is told, and nothing is launched
    match unsafe { module.call(&args, stream) } {
        Ok(()) => wrong += 1,
        Err(error) => println!("refused: {error}"),
    }
    Ok(wrong)
}

fn main() -> ExitCode {
    match run() {
        Ok(0) => {
            println!("all as expected");
            ExitCode::SUCCESS
        }
        Ok(wrong) => {
            println!("{wrong} wrong");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
