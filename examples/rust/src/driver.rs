//! The few functions of the CUDA driver that the example uses, loaded at run time. A program with a crate for CUDA, such
//! as cudarc, has these already.

use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::mem::size_of_val;

const RTLD_NOW: c_int = 2;

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

type Result<T> = std::result::Result<T, String>;

/// The driver, with the first GPU's context current in this thread.
pub struct Driver {
    library: *mut c_void,
}

fn checked(status: c_int, what: &str) -> Result<()> {
    match status {
        0 => Ok(()),
        _ => Err(format!("{what}: the CUDA driver reports error {status}")),
    }
}

impl Driver {
    pub fn start() -> Result<Self> {
        let library = unsafe { dlopen(c"libcuda.so.1".as_ptr(), RTLD_NOW) };
        if library.is_null() {
            return Err("no CUDA driver".into());
        }
        let driver = Self { library };
        let (mut device, mut context) = (0, std::ptr::null_mut::<c_void>());
        unsafe {
            let init: unsafe extern "C" fn(c_uint) -> c_int = driver.function(c"cuInit")?;
            checked(init(0), "cuInit")?;
            let get: unsafe extern "C" fn(*mut c_int, c_int) -> c_int = driver.function(c"cuDeviceGet")?;
            checked(get(&mut device, 0), "cuDeviceGet")?;
            let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int =
                driver.function(c"cuDevicePrimaryCtxRetain")?;
            checked(retain(&mut context, device), "cuDevicePrimaryCtxRetain")?;
            let set: unsafe extern "C" fn(*mut c_void) -> c_int = driver.function(c"cuCtxSetCurrent")?;
            checked(set(context), "cuCtxSetCurrent")?;
        }
        Ok(driver)
    }

    /// A function of the driver; `F` must be the type that the driver declares.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F> {
        let found = unsafe { dlsym(self.library, name.as_ptr()) };
        if found.is_null() {
            return Err(format!("the CUDA driver lacks {}", name.to_string_lossy()));
        }
        assert_eq!(size_of::<F>(), size_of_val(&found));
        Ok(unsafe { std::mem::transmute_copy(&found) })
    }

    /// Memory of the GPU.
    pub fn memory(&self, bytes: usize) -> Result<u64> {
        let mut address = 0;
        unsafe {
            let allocate: unsafe extern "C" fn(*mut u64, usize) -> c_int = self.function(c"cuMemAlloc_v2")?;
            checked(allocate(&mut address, bytes), "cuMemAlloc")?;
        }
        Ok(address)
    }

    /// Memory of the GPU with a copy of `data`.
    pub fn copy_of<T: Copy>(&self, data: &[T]) -> Result<u64> {
        let address = self.memory(size_of_val(data))?;
        unsafe {
            let copy: unsafe extern "C" fn(u64, *const c_void, usize) -> c_int = self.function(c"cuMemcpyHtoD_v2")?;
            checked(copy(address, data.as_ptr().cast(), size_of_val(data)), "cuMemcpyHtoD")?;
        }
        Ok(address)
    }

    /// Waits for everything, then copies from the GPU.
    pub fn fetch<T: Copy>(&self, out: &mut [T], address: u64) -> Result<()> {
        unsafe {
            let wait: unsafe extern "C" fn() -> c_int = self.function(c"cuCtxSynchronize")?;
            checked(wait(), "cuCtxSynchronize")?;
            let copy: unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int = self.function(c"cuMemcpyDtoH_v2")?;
            checked(copy(out.as_mut_ptr().cast(), address, size_of_val(out)), "cuMemcpyDtoH")
        }
    }
}
