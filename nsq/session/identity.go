package session

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/srtm-io/srtm/nsq/wire"
)

// Identity is a client's self-description with the values that the server granted. Before IDENTIFY
// it holds the server's defaults.
type Identity struct {
	ClientID  string // a publisher's id
	Hostname  string
	UserAgent string
	Region    string // where the client runs; "" if unknown
	Zone      string // within Region

	HeartbeatInterval   time.Duration // 0: no heartbeats, and no limit on silence
	OutputBufferSize    int           // bytes; 0: write at once
	OutputBufferTimeout time.Duration // 0: flush by size only
	MsgTimeout          time.Duration
	SampleRate          int // percent of messages to deliver, in [1, 99]; 0: all

	// Granted upgrades of the stream. At most one of Snappy and Deflate.
	TLS, Snappy, Deflate bool
	DeflateLevel         int // in [1, 9]; also set without Deflate

	negotiated bool // the client requests the granted values as JSON
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

// negotiate checks an IDENTIFY body against the server's limits. On any fault it grants nothing.
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

	// JSON libraries send 0 for a field that is not set, so 0 means the default. -1 disables a
	// feature.
	switch ms := req.HeartbeatInterval; {
	case ms == 0:
	case ms == -1:
		id.HeartbeatInterval = 0
	case !millisWithin(ms, MinHeartbeatInterval, c.MaxHeartbeatInterval):
		refuse("heartbeat interval (%d) is invalid", ms) // go-nsq's tests expect this text
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
	// Only a client that requests the answer knows what is granted. Other clients continue in plain
	// text.
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
