package session

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/srtm-io/srtm/nsq/wire"
)

// Identity is what a client said of itself and what was granted to it. Until
// IDENTIFY it holds the server's defaults.
type Identity struct {
	ClientID  string // the publisher id, where the client publishes
	Hostname  string
	UserAgent string
	Region    string // where it runs; "" if it did not say
	Zone      string // of that region

	HeartbeatInterval   time.Duration // 0: no heartbeats, and silence is not a fault
	OutputBufferSize    int           // bytes; 0: the client wants every write at once
	OutputBufferTimeout time.Duration // 0: flush by size only
	MsgTimeout          time.Duration
	SampleRate          int // percent of messages to deliver, in [1, 99]; 0: all

	// What the stream is wrapped in, once each has been carried out. At most
	// one of Snappy and Deflate.
	TLS, Snappy, Deflate bool
	DeflateLevel         int // in [1, 9]; what deflate would use, or uses

	negotiated bool // the client wants the granted values as JSON
}

func defaultIdentity(c *Config) Identity {
	return Identity{
		HeartbeatInterval:   c.HeartbeatInterval,
		OutputBufferSize:    c.OutputBufferSize,
		OutputBufferTimeout: c.OutputBufferTimeout,
		MsgTimeout:          c.MsgTimeout,
		DeflateLevel:        min(defaultDeflateLevel, c.MaxDeflateLevel),
	}
}

// negotiate reads an IDENTIFY body against the server's bounds. On any fault
// nothing is granted.
func negotiate(c *Config, body []byte) (Identity, *wire.Error) {
	id := defaultIdentity(c)
	var req wire.IdentifyRequest
	if err := json.Unmarshal(body, &req); err != nil {
		return id, wire.Wrap(wire.CodeBadBody, "IDENTIFY body is not the JSON it should be", err)
	}
	id.ClientID = firstOf(req.ClientID, req.ShortID)
	id.Hostname = firstOf(req.Hostname, req.LongID)
	id.UserAgent = req.UserAgent
	id.Region, id.Zone = req.TopologyRegion, req.TopologyZone
	id.negotiated = req.FeatureNegotiation

	var fault *wire.Error
	refuse := func(format string, args ...any) {
		if fault == nil {
			fault = wire.NewError(wire.CodeBadBody, "IDENTIFY "+fmt.Sprintf(format, args...))
		}
	}
	text := func(field, value string) {
		if len(value) > MaxIdentityText {
			refuse("%s of %d bytes is longer than %d", field, len(value), MaxIdentityText)
		}
	}
	text("client_id", id.ClientID)
	text("hostname", id.Hostname)
	text("user_agent", id.UserAgent)
	text("topology_region", id.Region)
	text("topology_zone", id.Zone)

	// 0 is what JSON libraries send for a field that was not set, so it is the
	// default everywhere; -1 turns a thing off.
	switch ms := req.HeartbeatInterval; {
	case ms == 0:
	case ms == -1:
		id.HeartbeatInterval = 0
	case !millisWithin(ms, MinHeartbeatInterval, c.MaxHeartbeatInterval):
		refuse("heartbeat interval (%d) is invalid", ms) // go-nsq's own tests expect these very words
	default:
		id.HeartbeatInterval = time.Duration(ms) * time.Millisecond
	}
	switch ms := req.OutputBufferTimeout; {
	case ms == 0:
	case ms == -1:
		id.OutputBufferTimeout = 0
	case !millisWithin(ms, c.MinOutputBufferTimeout, c.MaxOutputBufferTimeout):
		refuse("output_buffer_timeout %d is not -1 or in [%d, %d] ms", ms, c.MinOutputBufferTimeout.Milliseconds(), c.MaxOutputBufferTimeout.Milliseconds())
	default:
		id.OutputBufferTimeout = time.Duration(ms) * time.Millisecond
	}
	switch size := req.OutputBufferSize; {
	case size == 0:
	case size == -1:
		id.OutputBufferSize = 0
	case size < MinOutputBufferSize || size > int64(c.MaxOutputBufferSize):
		refuse("output_buffer_size %d is not -1 or in [%d, %d]", size, MinOutputBufferSize, c.MaxOutputBufferSize)
	default:
		id.OutputBufferSize = int(size)
	}
	switch ms := req.MsgTimeout; {
	case ms == 0:
	case !millisWithin(ms, min(MinMsgTimeout, c.MaxMsgTimeout), c.MaxMsgTimeout):
		refuse("msg_timeout %d is outside [%d, %d] ms", ms, min(MinMsgTimeout, c.MaxMsgTimeout).Milliseconds(), c.MaxMsgTimeout.Milliseconds())
	default:
		id.MsgTimeout = time.Duration(ms) * time.Millisecond
	}
	if req.SampleRate < 0 || req.SampleRate > MaxSampleRate {
		refuse("sample_rate %d is outside [0, %d]", req.SampleRate, MaxSampleRate)
	}
	id.SampleRate = int(req.SampleRate)
	if req.DeflateLevel > 0 {
		id.DeflateLevel = int(min(req.DeflateLevel, int64(c.MaxDeflateLevel)))
	}
	// What is granted is known to a client that reads the answer, and to no
	// other: one that did not ask for the answer goes on in the clear.
	if id.negotiated && fault == nil {
		id.TLS = c.TLS && req.TLSv1
		id.Snappy = c.Snappy && req.Snappy
		id.Deflate = c.Deflate && req.Deflate
		if id.Snappy && id.Deflate {
			fault = wire.NewError(wire.CodeIdentifyFailed, "IDENTIFY cannot have both snappy and deflate")
		}
	}
	return id, fault
}

// response is the answer to IDENTIFY.
func (id *Identity) response(c *Config) ([]byte, error) {
	if !id.negotiated {
		return []byte(wire.OK), nil
	}
	r := wire.IdentifyResponse{
		MaxRdyCount:         c.Limits.MaxRdy,
		Version:             c.Version,
		MaxMsgTimeout:       c.MaxMsgTimeout.Milliseconds(),
		MsgTimeout:          id.MsgTimeout.Milliseconds(),
		TLSv1:               id.TLS,
		Deflate:             id.Deflate,
		DeflateLevel:        id.DeflateLevel,
		MaxDeflateLevel:     c.MaxDeflateLevel,
		Snappy:              id.Snappy,
		SampleRate:          id.SampleRate,
		AuthRequired:        c.AuthRequired,
		OutputBufferSize:    id.OutputBufferSize,
		OutputBufferTimeout: id.OutputBufferTimeout.Milliseconds(),
	}
	if r.OutputBufferSize == 0 {
		r.OutputBufferSize = -1
	}
	if r.OutputBufferTimeout == 0 {
		r.OutputBufferTimeout = -1
	}
	return json.Marshal(r)
}

func millisWithin(ms int64, lo, hi time.Duration) bool {
	return ms >= lo.Milliseconds() && ms <= hi.Milliseconds()
}

func firstOf(a, b string) string {
	if a != "" {
		return a
	}
	return b
}
