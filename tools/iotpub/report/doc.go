// Package report is what a run of iotpub says of itself: lines of progress and
// a final report, as JSON for tools/srtm/up and other programs, and as text for
// people. It holds results and decides nothing but whether they are good.
package report
