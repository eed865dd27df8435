package targets

import (
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestWithPort(t *testing.T) {
	for address, want := range map[string]string{
		"localhost": "localhost:4170", "localhost:1": "localhost:1", "a,b:2,c": "a:4170,b:2,c:4170", "::1": "[::1]:4170", "[::1]": "[::1]:4170",
		"[::1]:5": "[::1]:5", "10.0.0.1": "10.0.0.1:4170", "": "", ":4171": ":4171", "a:b:c": "a:b:c", "http://a": "http://a", "/run/s": "/run/s",
	} {
		testkit.Equal(t, WithPort(address, LoaddistributorPort), want, "%q", address)
	}
	testkit.Equal(t, WithPort("localhost", ""), "localhost")
}
