package obs

import (
	"fmt"
	"runtime/debug"
)

// Release is the version that the next CHANGELOG entry will name.
const Release = "0.1.0"

// Version returns "SRTM x.y.z (commit)": the release and the commit that the
// binary was built from, with "+changes" where the tree had uncommitted ones.
func Version() string {
	info, _ := debug.ReadBuildInfo()
	return fmt.Sprintf("SRTM %s (%s)", Release, commit(info))
}

// commit names the commit in info: 12 digits, or "unknown commit" for a build
// without version control (a test, `go run`, a source archive).
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
