package program

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// Release is the version of the next CHANGELOG entry.
const Release = "0.2.0"

// NSQ is the version of NSQ that our nsqd and nsqlookupd replace, followed by our own.
// Client libraries and tools depend on it: nsq-j uses no Snappy with a version that
// begins with "0.", and nsqadmin requires a semantic version.
const NSQ = "1.3.0+srtm." + Release

// Banner returns the output of NSQ's daemon for --version and the first line of its log,
// in the form that scripts and test harnesses parse.
func Banner(daemon string) string {
	return fmt.Sprintf("%s v%s (built w/%s)", daemon, NSQ, runtime.Version())
}

// Version returns "SRTM x.y.z (commit)": the release and the commit of the binary.
func Version() string { return fmt.Sprintf("SRTM %s (%s)", Release, Commit()) }

// Commit names the commit of the binary, with "+changes" if the tree had uncommitted
// changes.
func Commit() string {
	info, _ := debug.ReadBuildInfo()
	return commit(info)
}

// commit names the commit in info: 12 digits, or "unknown commit" for a build without
// version control (a test, `go run`, a source archive).
func commit(info *debug.BuildInfo) string {
	var revision, changes string
	if info != nil {
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				revision = s.Value
			case "vcs.modified":
				if s.Value == "true" {
					changes = "+changes"
				}
			}
		}
	}
	if revision == "" {
		return "unknown commit"
	}
	if len(revision) > 12 {
		revision = revision[:12]
	}
	return revision + changes
}
