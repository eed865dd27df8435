package hostile

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/compress"
)

// attacks are kept for ever. The numbers are the effect on the others, or on the broker, when the
// attack was found.
var attacks = []attack{
	{
		// p50 0.1 -> 112 ms: the event loop parsed the IDENTIFY.
		name: "an IDENTIFY of 5 MB",
		strike: func(ctx context.Context, b *broker) error {
			return b.send(ctx, hugeIdentify)
		},
		every: 50 * time.Millisecond,
	},
	{
		// p99 2.5 -> 50 ms: each end of a subscription searched all deferred messages.
		name: "SUB and close, beside deferred messages",
		prepare: func(b *broker) error {
			const batches, n = 4, 100_000
			body := append(binary.BigEndian.AppendUint32(nil, n), bytes.Repeat([]byte("\x00\x00\x00\x01m"), n)...)
			for range batches {
				if err := b.post("/mpub?topic=deferred&binary=true&defer=3600000", bytes.NewReader(body)); err != nil {
					return err
				}
				if err := b.post("/channel/create?topic=deferred&channel=c", nil); err != nil {
					return err
				}
			}
			return nil
		},
		strike: func(ctx context.Context, b *broker) error {
			for range 20 { // the subscriptions end together
				nc, err := b.dial()
				if err != nil {
					return err
				}
				defer nc.Close()
				if err := write(nc, wire.AppendSub(nil, "deferred", "c")); err != nil {
					return ended(err)
				}
			}
			return nil
		},
		every: 20 * time.Millisecond,
	},
	{
		// p50 0.1 -> 19 ms at 3 MB/s: decompression kept a processor busy.
		name: "bombs of DEFLATE",
		strike: func(ctx context.Context, b *broker) error {
			return b.bombs(ctx, `"deflate":true`, deflated())
		},
		every: 50 * time.Millisecond,
	},
	{
		name: "bombs of Snappy",
		strike: func(ctx context.Context, b *broker) error {
			return b.bombs(ctx, `"snappy":true`, snappied())
		},
		every: 50 * time.Millisecond,
	},
	{
		// The blocks decompress to nothing, so the attacker pays for no part of the stream. 2 MB/s
		// keep a processor busy.
		name: "blocks of DEFLATE with nothing in them",
		strike: func(ctx context.Context, b *broker) error {
			return b.bombs(ctx, `"deflate":true`, emptyBlocks)
		},
		every: 50 * time.Millisecond,
	},
	{
		// p99 1.6 -> 278 ms, and 1.2 GB resident for 60 MB.
		name:  "MPUBs of a million messages of one byte",
		worst: busy,
		strike: func(ctx context.Context, b *broker) error {
			return b.send(ctx, million())
		},
		every: slice,
		check: func(b *broker) error {
			return b.residentBelow(300 << 20)
		},
	},
	{
		// The messages of a topic without readers fill the memory.
		name:  "a backlog that fills the memory",
		flags: []string{"--max-memory-bytes=20000000"},
		prepare: func(b *broker) error {
			return b.send(context.Background(), bytes.Repeat(wire.AppendPub(nil, "hoard", make([]byte, 100_000)), 300))
		},
		strike: func(ctx context.Context, b *broker) error {
			return b.send(ctx, wire.AppendPub(nil, "hoard", make([]byte, 100_000)))
		},
		every: 5 * time.Millisecond,
		check: func(b *broker) error {
			held, err := b.metric("srtm_nsqd_message_memory_bytes")
			if err == nil && held > 20_000_000 {
				err = fmt.Errorf("%.0f bytes are held", held)
			}
			if err != nil {
				return err
			}
			files, err := b.metric(`srtm_nsqd_topic_disk_files{topic="others-0"}`)
			if err == nil && files > 0 {
				err = errors.New("the others' messages had to go to disk")
			}
			return err
		},
	},
	{
		// Without a bound, each topic took memory and a place in every listing.
		name:  "topics without end",
		flags: few,
		strike: func(ctx context.Context, b *broker) error {
			var in []byte
			for range 50 {
				in = wire.AppendPub(in, fmt.Sprintf("made-up-%d", made.Add(1)), []byte("x"))
			}
			return ended(b.send(ctx, in))
		},
		every: 20 * time.Millisecond,
		check: func(b *broker) error { return b.refused("srtm_nsqd_names_refused_total") },
	},
	{
		// The attack used all descriptors, so nothing could be stored any more.
		name:  "connections without end",
		flags: few,
		strike: func(ctx context.Context, b *broker) error {
			for range 60 {
				nc, err := b.dial()
				if err != nil {
					return ended(err)
				}
				defer nc.Close()
			}
			<-ctx.Done()
			return nil
		},
		every: 50 * time.Millisecond,
		check: func(b *broker) error { return b.refused("srtm_nsqd_connections_refused_total") },
	},
}

// busy is attack.worst of an attack that keeps both processors busy: the others wait for the kernel's time
// slices of some ms, 3 to 6 times the quiet p99.
const busy = 10

// few are bounds that attacks reach at once.
var few = []string{"--max-topics=200", "--max-connections=50"}

var made atomic.Uint64 // names that are used only once

// refused returns an error unless the metric of the broker's refusals is above zero.
func (b *broker) refused(metric string) error {
	n, err := b.metric(metric)
	if err == nil && n == 0 {
		err = fmt.Errorf("%s is 0: nothing was refused", metric)
	}
	return err
}

var million = sync.OnceValue(func() []byte {
	const n = 1_000_000
	return sized("MPUB million\n", string(binary.BigEndian.AppendUint32(nil, n))+strings.Repeat("\x00\x00\x00\x01m", n))
})

// bombs sends data that decompresses to very much.
func (b *broker) bombs(ctx context.Context, compression string, bomb []byte) error {
	identify := wire.AppendIdentify(nil, []byte(`{"feature_negotiation":true,`+compression+`}`))
	return pour(ctx, b.dial, func(nc net.Conn) error { return write(nc, identify) }, bomb)
}

// pour opens two connections, begins each, and then writes what again and again as fast as the broker reads,
// until ctx ends.
func pour(ctx context.Context, dial func() (net.Conn, error), begin func(net.Conn) error, what []byte) error {
	const connections = 2
	var wg sync.WaitGroup
	defer wg.Wait()
	for range connections {
		nc, err := dial()
		if err != nil {
			return ended(err)
		}
		stop := context.AfterFunc(ctx, func() { nc.Close() })
		wg.Go(func() {
			defer nc.Close()
			defer stop()
			for err := begin(nc); err == nil; {
				_, err = nc.Write(what)
			}
		})
	}
	return nil
}

// nops are a megabyte of commands that do nothing. One in different commands differs from the others.
// The broker still decompresses the bytes in a socket after the attacker has gone, and at DEFLATE's
// thousand to one this would take minutes.
func nops(different int) (all []byte) {
	rng := rand.New(rand.NewPCG(1, 2))
	for len(all) < 1<<20 {
		all = append(all, "NOP\n"...)
		if rng.IntN(different) == 0 {
			all = append(all, "NOP\r\n"...)
		}
	}
	return all
}

// deflated is a megabyte without references to earlier data.
var deflated = sync.OnceValue(func() []byte {
	d := compress.NewDeflate(9)
	d.Remember()
	return d.Append(nil, nops(64))
})

// emptyBlocks are blocks with their own codes, for which the decompressor has to build tables, and
// then the end of the block: 8 blocks in 90 bytes.
var emptyBlocks = bytes.Repeat([]byte("\x04\xc0\x81\x00\x00\x00\x00\x00\x90\xff\x6b\x10\x00\x07\x02\x00\x00\x00\x00\x40\xfe\xaf\x41\x00\x1c\x08\x00\x00\x00\x00\x00\xf9\xbf\x06\x01\x70\x20\x00\x00\x00\x00\x00\xe4\xff\x1a\x04\xc0\x81\x00\x00\x00\x00\x00\x90\xff\x6b\x10\x00\x07\x02\x00\x00\x00\x00\x40\xfe\xaf\x41\x00\x1c\x08\x00\x00\x00\x00\x00\xf9\xbf\x06\x01\x70\x20\x00\x00\x00\x00\x00\xe4\xff\x1a"), 100)

// snappied begins with the stream's identifier, which may be repeated.
var snappied = sync.OnceValue(func() []byte { return new(compress.Snappy).Append(nil, nops(1<<20)) })

var hugeIdentify = sized("IDENTIFY\n", `{"more":[`+strings.Repeat("{},", 1_600_000)+`{}]}`)

// sized returns a command with a body.
func sized(line, body string) []byte {
	b := binary.BigEndian.AppendUint32([]byte(line), uint32(len(body)))
	return append(b, body...)
}

// send opens a connection, writes, and waits for an answer or the end.
func (b *broker) send(ctx context.Context, what []byte) error {
	nc, err := b.dial()
	if err != nil {
		return err
	}
	defer nc.Close()
	defer context.AfterFunc(ctx, func() { nc.Close() })()
	return ended(write(nc, what))
}

func write(nc net.Conn, what []byte) error {
	if _, err := nc.Write(what); err != nil {
		return err
	}
	_, _, err := frames.Read(nc, maxFrame)
	return err
}

// ended drops errors of a connection that the broker has ended, or that ended with the slice.
func ended(err error) error {
	var op *net.OpError
	if errors.As(err, &op) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil
	}
	return err
}
