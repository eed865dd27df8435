//go:build race

package hostile

// raceDetector says that this test runs under the race detector; then an nsqd
// with it is attacked as well.
const raceDetector = true
