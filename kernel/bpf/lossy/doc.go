// Package lossy holds a program that makes a network interface lose and duplicate TCP segments, and
// a program that records the arrival of each segment. Only tests of kernel/hook use them, on a pair
// of virtual interfaces.
//
//	go generate ./kernel/bpf/...
package lossy

//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -no-global-types -target bpfel,bpfeb -cflags "-O2 -Wall -Wextra -Werror -mcpu=v3 -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu" Lossy lossy.c
