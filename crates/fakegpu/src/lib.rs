//! A libcuda/libamdhip64 on host memory that detects misuse. Development only.
