// Package random throws dice that nobody gave it.
package random

import "math/rand/v2"

// Roll uses the global generator.
func Roll(rng *rand.Rand) int {
	dice := rand.IntN                             // want "math/rand/v2.IntN"
	return dice(6) + rng.IntN(6) + int(rand.N(6)) // want "math/rand/v2.N"
}
