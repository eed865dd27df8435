// Package report defines the output of an iotpub run: lines of progress and a final report,
// as JSON for tools/srtm/up and other programs, and as text for people. The package holds
// results, and decides only whether a run has failed.
package report
