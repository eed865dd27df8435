//go:build !linux

package local

import "syscall"

func childAttributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

func lockThread() (unlock func()) { return func() {} }
