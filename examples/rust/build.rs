//! Compiles the C sources of an exported module into a static library, with the C compiler that is there.
//!
//! MLA_EXPORT is the folder that `mla-cupy export --rust` wrote to, CC the compiler (default: cc).

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}

fn compiled(source: &Path, object: &Path) {
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".into());
    run(Command::new(compiler).args(["-std=c11", "-O2", "-fPIC", "-c"]).arg(source).arg("-o").arg(object));
}

fn main() {
    println!("cargo:rerun-if-env-changed=MLA_EXPORT");
    println!("cargo:rerun-if-env-changed=CC");
    let folder = env::var("MLA_EXPORT").expect("MLA_EXPORT: the absolute path of a folder of `mla-cupy export --rust`");
    let folder = PathBuf::from(folder);
    let out = PathBuf::from(env::var("OUT_DIR").unwrap());
    let mut objects = Vec::new();
    for name in ["mla_decode", "mla_decode_images"] {
        let source = folder.join(name).with_extension("c");
        println!("cargo:rerun-if-changed={}", source.display());
        objects.push(out.join(name).with_extension("o"));
        compiled(&source, &objects[objects.len() - 1]);
    }
    run(Command::new("ar").arg("crs").arg(out.join("libmla_decode.a")).args(&objects));
    println!("cargo:rustc-link-search=native={}", out.display());
    println!("cargo:rustc-link-lib=static=mla_decode");
    println!("cargo:rustc-link-lib=dl");
    println!("cargo:rustc-link-lib=m");
    let bindings = folder.join("mla_decode.rs");
    println!("cargo:rerun-if-changed={}", bindings.display());
    println!("cargo:rustc-env=MLA_DECODE_RS={}", bindings.display());
}
