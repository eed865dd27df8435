package hook

import (
	"fmt"
	"os"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// childEnv names the function that this binary runs instead of the tests, if a test started the binary with other
// privileges or in another namespace.
const childEnv = "SRTM_HOOK_CHILD"

var children = map[string]func() error{}

func TestMain(m *testing.M) {
	if name := os.Getenv(childEnv); name != "" {
		if err := children[name](); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	testkit.Main(m)
}
