package payload_test

import (
	"bytes"
	"encoding/hex"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/iotpub/payload"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestBytes(t *testing.T) {
	p := payload.Payload{Run: 0x01020304, Source: 5, Seq: 0xfffffffe, Intended: 0x1122334455667788}
	got := payload.Append([]byte("before"), p, 28)
	const want = "6265666f7265" + "53525450" + "01020304" + "00000005" + "fffffffe" + "1122334455667788" + "00000000"
	if hex.EncodeToString(got) != want {
		t.Errorf("got  %x\nwant %s", got, want)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(payload.Append(nil, payload.Payload{Run: 1, Source: 2, Seq: 3, Intended: 4}, 24))
	f.Add(payload.Append(nil, payload.Payload{Intended: -1}, 100))
	f.Add([]byte("SRTP"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, body []byte) {
		p, ok := payload.Parse(body)
		if !ok {
			testkit.MustEqual(t, p, (payload.Payload{}), "refused, but returned")
			if len(body) >= payload.Size && bytes.HasPrefix(body, []byte("SRTP")) {
				t.Fatalf("refused %x", body)
			}
			return
		}
		again := payload.Append(nil, p, len(body))
		if len(again) != len(body) || !bytes.Equal(again[:payload.Size], body[:payload.Size]) {
			t.Fatalf("%x became %x", body, again)
		}
	})
}

func TestAppendPadsToAnySize(t *testing.T) {
	for size := payload.Size; size < 300; size++ {
		body := payload.Append(nil, payload.Payload{Seq: 7}, size)
		if p, ok := payload.Parse(body); len(body) != size || !ok || p.Seq != 7 {
			t.Fatalf("size %d: %d bytes, %+v, %v", size, len(body), p, ok)
		}
		if bytes.Trim(body[payload.Size:], "\x00") == nil {
			continue
		}
		t.Fatalf("size %d: padding is not zero", size)
	}
}

func TestAppendRefusesLessThanTheHeader(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("a body of 23 bytes was made")
		}
	}()
	payload.Append(nil, payload.Payload{}, payload.Size-1)
}

func TestNoAllocation(t *testing.T) {
	buf := make([]byte, 0, 1000)
	testkit.Equal(t, testing.AllocsPerRun(100, func() {
		buf = payload.Append(buf[:0], payload.Payload{Seq: 1}, 1000)
		if _, ok := payload.Parse(buf); !ok {
			t.Fatal("refused")
		}
	}), 0, "allocations")
}
