package commitlog

import "syscall"

// SimDisk exports simDisk to tests of packages that use a log.
type SimDisk = simDisk

var NewSimDisk = newSimDisk

// Disk returns the operations of the disk.
func (d *SimDisk) Disk() Disk { return d.disk() }

// DieSoon cuts the power at the n-th operation from now on.
func (d *SimDisk) DieSoon(n int) {
	d.mu.Lock()
	d.dieAt = d.ops + n
	d.mu.Unlock()
}

// Die cuts the power now.
func (d *SimDisk) Die() {
	d.mu.Lock()
	d.dead = true
	d.mu.Unlock()
}

// Dead reports whether the power is gone.
func (d *SimDisk) Dead() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.dead
}

// Crash returns the disk as a restart may find the disk after a loss of power now.
func (d *SimDisk) Crash() *SimDisk { return d.crash() }

// Kill makes the disk work again for another process, with all written data.
func (d *SimDisk) Kill() {
	d.kill()
	d.mu.Lock()
	d.dead, d.dieAt = false, 0
	d.mu.Unlock()
}

// Fail makes the given percentage of operations fail from now on, as if the disk were full or broken. Unless forgets is
// set, data of a failed fsync still reads as written.
func (d *SimDisk) Fail(percent int, forgets bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mindful = !forgets
	d.fault = func(string, string) error {
		if d.rng.IntN(100) >= percent {
			return nil
		}
		return []error{syscall.EIO, syscall.ENOSPC}[d.rng.IntN(2)]
	}
}
