package conn_test

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/conn"
)

// dir is short: a socket's path has 107 bytes at the most.
func dir(t *testing.T) string {
	t.Helper()
	d := testkit.Result(os.MkdirTemp("", "ep")).Must(t)
	t.Cleanup(func() { os.RemoveAll(d) })
	return d
}

func listen(t *testing.T, address string) net.Listener {
	t.Helper()
	ln := testkit.Result(conn.ListenAt(t.Context(), net.ListenConfig{}, address)).Must(t)
	t.Cleanup(func() { ln.Close() })
	return ln
}

func TestWhatIsAPath(t *testing.T) {
	for address, want := range map[string]bool{
		"127.0.0.1:4150": false, ":4150": false, "[::1]:4150": false, "localhost:nsq": false, "nsqd.sock": false, "": false,
		"/run/nsqd.sock": true, "./nsqd.sock": true, "run/nsqd.sock": true,
	} {
		testkit.Equal(t, conn.IsPath(address), want, "%q", address)
	}
}

func TestPorts(t *testing.T) {
	ln := listen(t, "127.0.0.1:0")
	if got := conn.Port(ln.Addr()); got <= 0 {
		t.Errorf("TCP: %d", got)
	}
	testkit.Equal(t, conn.Port(listen(t, dir(t)+"/s").Addr()), -1, "Unix")
	testkit.Equal(t, conn.Port(nil), -1, "none")
}

func TestASocketIsThereWhileItIsListenedAt(t *testing.T) {
	path := filepath.Join(dir(t), "s")
	ln := listen(t, path)
	nc := testkit.Result(net.Dial("unix", path)).Must(t)
	nc.Close()
	_, err := conn.ListenAt(t.Context(), net.ListenConfig{}, path)
	testkit.ErrorHas(t, err, "in use", "a second listener at the same path")
	testkit.Must(t, ln.Close())
	if _, err := os.Lstat(path); err == nil {
		t.Error("the socket outlives its listener")
	}
}

func TestASocketThatWasLeftIsReplaced(t *testing.T) {
	path := filepath.Join(dir(t), "s")
	ln := listen(t, path).(*net.UnixListener)
	ln.SetUnlinkOnClose(false) // as after a kill of the process
	testkit.Must(t, ln.Close())
	listen(t, path)
	nc := testkit.Result(net.Dial("unix", path)).Must(t)
	nc.Close()
}

func TestOtherFilesAreLeftAlone(t *testing.T) {
	path := filepath.Join(dir(t), "s")
	testkit.Must(t, os.WriteFile(path, []byte("precious"), 0o600))
	_, err := conn.ListenAt(t.Context(), net.ListenConfig{}, path)
	testkit.ErrorHas(t, err, "no socket")
	if b, err := os.ReadFile(path); err != nil || string(b) != "precious" {
		t.Errorf("%q %v", b, err)
	}
	if _, err := conn.ListenAt(t.Context(), net.ListenConfig{}, filepath.Join(path, "below")); err == nil {
		t.Error("listens below a file")
	}
}
