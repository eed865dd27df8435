package client

import (
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// The error lists every faulty line of a file of keys.
func TestFaultsOfKeys(t *testing.T) {
	for text, want := range map[string]string{
		"1\n70000 xy\n# none\n5 00112233445566778899aabbccddeeff\n": "FILE, line 1: want a number and a secret in hex\nFILE, line 2: the number is not 0 to 65535\nFILE, line 2: the secret is not hex",
		"# none\n": "FILE has no key",
	} {
		path := testkit.File(t, "keys", text)
		_, err := ReadKeys(path)
		if err == nil || strings.ReplaceAll(err.Error(), path, "FILE") != want {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
	keys := testkit.Result(ReadKeys(testkit.File(t, "keys", "7 00112233445566778899aabbccddeeff # first\n"))).Must(t)
	testkit.Equal(t, len(keys), 1, "keys")
}
