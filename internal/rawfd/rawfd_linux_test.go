package rawfd

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestWhatIsThereAndWhatIsTaken(t *testing.T) {
	ends := testkit.Result(unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)).Must(t)
	defer unix.Close(ends[1])
	b := make([]byte, 100)
	if n, errno := Read(ends[1], b); n != 0 || errno != unix.EAGAIN {
		t.Errorf("nothing there: %d, %v", n, errno)
	}
	if n, errno := Write(ends[0], []byte("abc")); n != 3 || errno != 0 {
		t.Errorf("three bytes: %d, %v", n, errno)
	}
	if n, errno := Read(ends[1], b); n != 3 || errno != 0 || string(b[:3]) != "abc" {
		t.Errorf("three bytes: %d, %v, %q", n, errno, b[:n])
	}
	for sent := 0; ; {
		n, errno := Write(ends[0], make([]byte, 1<<20))
		if errno == unix.EAGAIN && n == 0 && sent > 0 {
			break
		}
		if errno != 0 || n <= 0 {
			t.Fatalf("after %d: %d, %v", sent, n, errno)
		}
		sent += n
	}
	testkit.Must(t, unix.Close(ends[0]))
	for {
		n, errno := Read(ends[1], b)
		testkit.MustEqual(t, errno, 0)
		if n == 0 {
			break // the end
		}
	}
	if n, errno := Write(ends[1], b); n != 0 || errno != unix.EPIPE {
		t.Errorf("no peer: %d, %v", n, errno)
	}
}
