package hook

import (
	"errors"
	"os"
	"testing"

	"github.com/cilium/ebpf/btf"

	"github.com/srtm-io/srtm/internal/testkit"
)

// The full decoder must find the same offsets.
func TestTCPSockIsWhereTheFullDecoderFindsIt(t *testing.T) {
	got, err := tcpSock()
	if errors.Is(err, os.ErrNotExist) {
		t.Skipf("this kernel has no type information: %v", err)
	}
	testkit.Must(t, err)
	spec := testkit.Result(btf.LoadKernelSpec()).Must(t)
	var sock *btf.Struct
	testkit.Must(t, spec.TypeByName("tcp_sock", &sock))
	var want [2]uint32
	for _, m := range sock.Members {
		switch m.Name {
		case "rcv_nxt":
			want[0] = m.Offset.Bytes()
		case "bytes_received":
			want[1] = m.Offset.Bytes()
		}
	}
	if got != want || want[0] == 0 || want[1] == 0 {
		t.Errorf("%v, want %v", got, want)
	}
}
