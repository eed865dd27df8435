package commitlog

import "syscall"

// SimDisk is simDisk, for tests of those who use a log.
type SimDisk = simDisk

var NewSimDisk = newSimDisk

// Disk returns the operations.
func (d *SimDisk) Disk() Disk { return d.disk() }

// DieSoon has the power go at the n-th operation from now on.
func (d *SimDisk) DieSoon(n int) {
	d.mu.Lock()
	d.dieAt = d.ops + n
	d.mu.Unlock()
}

// Die has the power go now.
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

// Crash returns the disk as it may be found after a loss of power now.
func (d *SimDisk) Crash() *SimDisk { return d.crash() }

// Kill has it work again for another process: what was written is there.
func (d *SimDisk) Kill() {
	d.kill()
	d.mu.Lock()
	d.dead, d.dieAt = false, 0
	d.mu.Unlock()
}

// Fail has so many of a hundred operations fail from now on: the disk is full, or broken.
// Unless it forgets, what an fsync fails for still reads as it was written.
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
