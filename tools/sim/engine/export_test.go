package engine

import "time"

// Constant is the distribution of a single value. Requires: d >= 0.
func Constant(d time.Duration) Dist { return Dist{[]Point{{0, d}}} }
