//go:build !linux

package main

import "runtime"

func (d *doctor) machine() {
	d.add("machine", skipped, "", "what is checked of a machine is Linux's; this is %s", runtime.GOOS)
}

func (d *doctor) space(folder string) {
	d.add("space of "+folder, skipped, "", "only looked at on Linux")
}
