// Package bpf holds the kernel program that runs for every segment of a tracked connection, and the
// Go code generated from it. kernel/stamp describes the memory layout of records. kernel/hook loads
// the program.
//
// The compiled objects are committed, so a build needs no clang. Generating them requires clang 14
// (the bytes depend on its version) and libbpf's headers:
//
//	go generate ./kernel/bpf
package bpf

//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -no-global-types -target bpfel,bpfeb -cflags "-O2 -Wall -Wextra -Werror -mcpu=v3 -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu" Arrival arrival.c
