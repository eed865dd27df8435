package stamp

// A ring holds a power of two of records, from MinRing to MaxRing: with
// MaxRing the 12-bit lap mark of a record still spans four laps.
const (
	MinRing = 64
	MaxRing = 1024
)
