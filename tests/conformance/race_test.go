//go:build race

package conformance

// raceDetector says that this test runs under the race detector, and so should
// the nsqd it builds.
const raceDetector = true
