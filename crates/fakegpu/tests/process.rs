//! What the library does when its process ends, forks, or commits a misuse that is to end it: seen from outside, in
//! children that run one of the ignored tests below.

#![allow(clippy::unwrap_used)]

use fakegpu::Library;
use std::process::{Command, Output};

fn child(test: &str, variables: &[(&str, &str)]) -> Output {
    let own = std::env::current_exe().unwrap();
    let arguments = ["--exact", test, "--ignored", "--nocapture", "--test-threads=1"];
    Command::new(own).args(arguments).envs(variables.iter().copied()).output().unwrap()
}

/// Calls a driver function that takes one integer.
fn call(library: &Library, name: &std::ffi::CStr, argument: u64) -> i32 {
    let path = std::ffi::CString::new(library.path().to_str().unwrap()).unwrap();
    // SAFETY: C strings; the library is loaded already, and the functions asked for take one integer.
    unsafe {
        let function = libc::dlsym(libc::dlopen(path.as_ptr(), libc::RTLD_NOW), name.as_ptr());
        assert!(!function.is_null());
        std::mem::transmute::<*mut libc::c_void, extern "C" fn(u64) -> i32>(function)(argument)
    }
}

#[test]
#[ignore = "runs in a child"]
fn child_that_misuses() {
    let library = Library::exclusive().unwrap();
    assert_eq!(call(&library, c"cuEventQuery", 77), 400);
    println!("still here");
}

#[test]
#[ignore = "runs in a child"]
fn child_that_forks() {
    let library = Library::exclusive().unwrap();
    assert_eq!(call(&library, c"cuInit", 0), 0);
    // SAFETY: the child only calls a function that takes no lock, and leaves.
    unsafe {
        let pid = libc::fork();
        if pid == 0 {
            let code = call(&library, c"cuInit", 0);
            libc::_exit(code);
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
        println!("the child got {}", libc::WEXITSTATUS(status));
    }
}

#[test]
fn the_report_holds_the_misuses_when_the_process_has_ended() {
    let path = std::env::temp_dir().join(format!("fakegpu-report-{}", std::process::id()));
    let output = child("child_that_misuses", &[("FAKEGPU_REPORT", path.to_str().unwrap())]);
    assert!(output.status.success(), "{output:?}");
    let report = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(report, "dead-handle: cuEventQuery: event 0x4d never existed\n");
}

#[test]
fn a_misuse_ends_the_process_where_that_is_asked_for() {
    let output = child("child_that_misuses", &[("FAKEGPU_ON_MISUSE", "abort")]);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!output.status.success() && err.contains("fakegpu: dead-handle: ") && !out.contains("still here"));
}

#[test]
fn a_setting_that_makes_no_sense_ends_the_process() {
    let output = child("child_that_misuses", &[("FAKEGPU_MEMORY", "plenty")]);
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains("FAKEGPU_MEMORY"));
}

#[test]
fn a_forked_child_is_told_that_the_driver_is_gone() {
    let output = child("child_that_forks", &[]);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(out.contains("the child got 3") && err.contains("used-after-fork: cuInit"), "{out}{err}");
}
