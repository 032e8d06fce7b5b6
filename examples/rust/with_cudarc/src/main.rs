//! The same as ../src/main.rs with cudarc's context, stream and slices in place of the driver's own functions.
//!
//! ```text
//! mla-cupy export --op decode --h-q 16 --page-size 64 --arch sm_90a --rust --out build/decode
//! MLA_EXPORT=$PWD/build/decode cargo run --manifest-path examples/rust/with_cudarc/Cargo.toml --target-dir build/rust
//! ```

#[path = "../../src/batch.rs"]
mod batch;

/// What the export wrote.
#[allow(dead_code)]
mod mla_decode {
    include!(env!("MLA_DECODE_RS"));
}

use batch::{BATCH, BLOCK_TABLE, HEADS, MAX_PAGES, PAGES, PAGE_SIZE, SEQLENS, VALUE_WIDTH, WIDTH};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError};
use mla_decode::{Args, Module};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

/// The arrays of a call; cudarc frees them on the stream when they are dropped.
struct Batch {
    q: CudaSlice<u16>,
    kv_cache: CudaSlice<u16>,
    block_table: CudaSlice<i32>,
    seqlens: CudaSlice<i32>,
    out: CudaSlice<u16>,
    lse: CudaSlice<f32>,
}

impl Batch {
    fn new(stream: &Arc<CudaStream>) -> Result<Self, DriverError> {
        Ok(Self {
            q: stream.clone_htod(&batch::elements(BATCH * HEADS * WIDTH, 0))?,
            kv_cache: stream.clone_htod(&batch::elements(PAGES * PAGE_SIZE * WIDTH, 1 << 20))?,
            block_table: stream.clone_htod(BLOCK_TABLE.as_flattened())?,
            seqlens: stream.clone_htod(&SEQLENS)?,
            out: stream.alloc_zeros(BATCH * HEADS * VALUE_WIDTH)?,
            lse: stream.alloc_zeros(BATCH * HEADS)?,
        })
    }

    /// Enqueues the call. The guards beside the addresses tell cudarc, when they go, that the stream uses the slices.
    fn decode(&mut self, module: &Module, stream: &Arc<CudaStream>) -> Result<(), Box<dyn Error>> {
        let (q, _q) = self.q.device_ptr(stream);
        let (kv_cache, _kv_cache) = self.kv_cache.device_ptr(stream);
        let (block_table, _block_table) = self.block_table.device_ptr(stream);
        let (seqlens, _seqlens) = self.seqlens.device_ptr(stream);
        let (out, _out) = self.out.device_ptr_mut(stream);
        let (lse, _lse) = self.lse.device_ptr_mut(stream);
        let mut args = Args {
            b: BATCH as i64,
            num_pages: PAGES as i64,
            max_pages: MAX_PAGES as i64,
            scale: 192f64.powf(-0.5), // DeepSeek-V3's
            q,
            kv_cache,
            block_table,
            seqlens,
            out,
            lse,
            ..Default::default()
        };
        args.contiguous();
        args.workspace_bytes = module.workspace(&args)?;
        let mut workspace: CudaSlice<u8> = stream.alloc_zeros(args.workspace_bytes.max(1))?;
        let (address, _workspace) = workspace.device_ptr_mut(stream);
        args.workspace = address;
        unsafe { module.call(&args, stream.cu_stream().cast()) }?;
        Ok(())
    }
}

fn run() -> Result<usize, Box<dyn Error>> {
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let module = Module::open()?; // loads the kernels for the current context
    let mut batch = Batch::new(&stream)?;
    batch.decode(&module, &stream)?;
    let (out, lse) = (stream.clone_dtoh(&batch.out)?, stream.clone_dtoh(&batch.lse)?);
    stream.synchronize()?;
    Ok(batch::wrong_results(&out, &lse))
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
