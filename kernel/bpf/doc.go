// Package bpf holds the program that runs in the kernel for every segment of
// a tracked connection, and the Go that is generated from it. The layout its
// records have in memory is described in kernel/stamp; kernel/hook loads it.
//
// The compiled objects are committed, so building needs no clang. Regenerating
// them needs clang 14 (the bytes depend on its version) and libbpf's headers:
//
//	go generate ./kernel/bpf
package bpf

//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -no-global-types -target bpfel,bpfeb -cflags "-O2 -Wall -Wextra -Werror -mcpu=v3 -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu" Arrival arrival.c
