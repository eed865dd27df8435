package hook

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"
)

// btfOf makes type information of whole types and strings.
func btfOf(types, texts []byte) []byte {
	order := binary.NativeEndian
	b := order.AppendUint16(nil, btfMagic)
	b = append(b, 1, 0)
	for _, n := range []int{btfHeader, 0, len(types), len(types), len(texts)} {
		b = order.AppendUint32(b, uint32(n))
	}
	return slices.Concat(b, types, texts)
}

func words(ws ...uint32) (b []byte) {
	for _, w := range ws {
		b = binary.NativeEndian.AppendUint32(b, w)
	}
	return b
}

// example has an integer, a struct of another name, and
//
//	struct tcp { int a; int b : 3; int c; int d : 8; }
func example() []byte {
	texts := []byte("\x00int\x00tcp_other\x00tcp\x00a\x00b\x00c\x00d\x00")
	at := func(s string) uint32 { return uint32(bytes.Index(texts, []byte("\x00"+s+"\x00"))) + 1 }
	types := slices.Concat(
		words(at("int"), 1<<24, 4, 32),
		words(at("tcp_other"), 4<<24|1, 4, at("a"), 1, 64),
		words(at("tcp"), 4<<24|btfBitfields|4, 16,
			at("a"), 1, 0, at("b"), 1, 3<<24|32, at("c"), 1, 64, at("d"), 1, 96),
	)
	return btfOf(types, texts)
}

func TestMembersAt(t *testing.T) {
	btf := example()
	if at, err := membersAt(btf, "tcp", "c", "a", "d"); err != nil || !slices.Equal(at, []uint32{8, 0, 12}) {
		t.Errorf("%v, %v", at, err)
	}
	for _, tc := range []struct{ name, member, want string }{
		{"tcp", "b", "no member b"}, {"tcp", "e", "no member e"}, {"tc", "a", "no struct tc"}, {"tcp_othe", "a", "no struct"},
	} {
		if at, err := membersAt(btf, tc.name, tc.member); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s.%s: %v, %v", tc.name, tc.member, at, err)
		}
	}
	for n := range len(btf) {
		if at, err := membersAt(btf[:n], "tcp", "a"); !errors.Is(err, errBTF) {
			t.Errorf("cut to %d bytes: %v, %v", n, at, err)
		}
	}
}

func FuzzMembersAt(f *testing.F) {
	f.Add(example())
	f.Add(btfOf(words(1, 31<<24, 0), []byte("\x00tcp")))
	f.Add(btfOf(words(1, 4<<24|0xffff, 0), []byte("\x00tcp\x00")))
	f.Fuzz(func(t *testing.T, btf []byte) {
		if at, err := membersAt(btf, "tcp", "a", "c"); (err == nil) != (len(at) == 2) {
			t.Errorf("%v, %v", at, err)
		}
	})
}
