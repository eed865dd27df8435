package wire

// IdentifyRequest is the JSON body of IDENTIFY. A number of 0 selects the server's default. Times
// are in milliseconds, sizes in bytes. Unknown fields are ignored.
type IdentifyRequest struct {
	ClientID            string `json:"client_id,omitempty"`
	Hostname            string `json:"hostname,omitempty"`
	ShortID             string `json:"short_id,omitempty"` // deprecated name of client_id
	LongID              string `json:"long_id,omitempty"`  // deprecated name of hostname
	UserAgent           string `json:"user_agent,omitempty"`
	FeatureNegotiation  bool   `json:"feature_negotiation,omitempty"`
	HeartbeatInterval   int64  `json:"heartbeat_interval,omitempty"`    // -1: none
	OutputBufferSize    int64  `json:"output_buffer_size,omitempty"`    // -1: none
	OutputBufferTimeout int64  `json:"output_buffer_timeout,omitempty"` // -1: none
	SampleRate          int64  `json:"sample_rate,omitempty"`           // percent of messages; 0: all
	MsgTimeout          int64  `json:"msg_timeout,omitempty"`
	TLSv1               bool   `json:"tls_v1,omitempty"`
	Snappy              bool   `json:"snappy,omitempty"`
	Deflate             bool   `json:"deflate,omitempty"`
	DeflateLevel        int64  `json:"deflate_level,omitempty"`
	TopologyRegion      string `json:"topology_region,omitempty"`
	TopologyZone        string `json:"topology_zone,omitempty"`
}

// IdentifyResponse is the JSON answer to an IDENTIFY with feature_negotiation: the granted values.
// Times are in milliseconds, sizes in bytes.
type IdentifyResponse struct {
	MaxRdyCount         int    `json:"max_rdy_count"`
	Version             string `json:"version"`
	MaxMsgTimeout       int64  `json:"max_msg_timeout"`
	MsgTimeout          int64  `json:"msg_timeout"`
	TLSv1               bool   `json:"tls_v1"`
	Deflate             bool   `json:"deflate"`
	DeflateLevel        int    `json:"deflate_level"`
	MaxDeflateLevel     int    `json:"max_deflate_level"`
	Snappy              bool   `json:"snappy"`
	SampleRate          int    `json:"sample_rate"`
	AuthRequired        bool   `json:"auth_required"`
	OutputBufferSize    int    `json:"output_buffer_size"`    // -1: none
	OutputBufferTimeout int64  `json:"output_buffer_timeout"` // -1: none
}
