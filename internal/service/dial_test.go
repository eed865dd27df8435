package service

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

func TestFlags(t *testing.T) {
	var one string
	f := AddressFlag(&one, "localhost", NSQPort)
	testkit.Equal(t, one, "localhost:4150", "default")
	testkit.Must(t, f.Set("a,b:1"))
	testkit.Equal(t, one, "a:4150,b:1", "given")
	testkit.Must(t, f.Set(""))
	testkit.Equal(t, f.String(), "", "empty")

	var several []string
	f = AddressesFlag(&several, NSQHTTPPort)
	testkit.Equal(t, f.String(), "", "none")
	for _, value := range []string{"a,b:1", "https://c", "::1"} {
		testkit.Must(t, f.Set(value))
	}
	testkit.EqualSlices(t, several, []string{"a:4151", "b:1", "https://c", "[::1]:4151"}, "given")
}
