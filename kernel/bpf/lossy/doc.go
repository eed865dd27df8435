// Package lossy holds a program that makes a network interface lose and double
// TCP segments, and one that notes when each came. Tests of kernel/hook attach
// them to a pair of virtual interfaces; nothing else uses them.
//
//	go generate ./kernel/bpf/...
package lossy

//go:generate go tool bpf2go -cc clang-14 -strip llvm-strip-14 -no-global-types -target bpfel,bpfeb -cflags "-O2 -Wall -Wextra -Werror -mcpu=v3 -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu" Lossy lossy.c
