package hook

import (
	"errors"
	"os"
	"testing"

	"github.com/cilium/ebpf/btf"
)

// The full decoder must find the same.
func TestTCPSockIsWhereTheFullDecoderFindsIt(t *testing.T) {
	got, err := tcpSock()
	if errors.Is(err, os.ErrNotExist) {
		t.Skipf("this kernel has no type information: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		t.Fatal(err)
	}
	var sock *btf.Struct
	if err := spec.TypeByName("tcp_sock", &sock); err != nil {
		t.Fatal(err)
	}
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
