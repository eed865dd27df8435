package session

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/srtm-io/srtm/mqtt/names"
	"github.com/srtm-io/srtm/mqtt/packet"
	nsq "github.com/srtm-io/srtm/nsq/session"
)

// connect decodes a CONNECT.
func (s *Session) connect(r *packet.Reader, op *nsq.Op) *Error {
	protocol, version := r.Binary(), r.Byte()
	switch {
	case r.Failed || string(protocol) != "MQTT" && string(protocol) != "MQIsdp":
		return malformed("CONNECT does not begin with the protocol name MQTT")
	case string(protocol) != "MQTT" || version < packet.V311:
		s.version = packet.V311 // for the form of the refusal
		return &Error{Reason: UnsupportedVersion, Text: "the client speaks a version before MQTT 3.1.1"}
	case version > packet.V5:
		s.version = packet.V5
		return &Error{Reason: UnsupportedVersion, Text: "the client speaks a version after MQTT 5.0"}
	}
	s.version, s.connectedAt = version, s.wall
	flags := r.Byte()
	c := &nsq.Connect{CleanStart: flags&2 != 0}
	s.keepAlive = time.Duration(r.Uint16()) * time.Second
	var p properties
	if version == packet.V5 {
		if err := readProperties(r, packet.Connect, &p); err != nil {
			return err
		}
	}
	s.terse = p.has(packet.ProblemInfo) && p.values[packet.ProblemInfo] == 0 || p.has(packet.MaximumPacket) && p.values[packet.MaximumPacket] < 2*maxReasonText
	id := r.Text()
	hasWill, willQoS, willRetain := flags&4 != 0, flags>>3&3, flags&32 != 0
	hasUser, hasPassword := flags&128 != 0, flags&64 != 0
	if flags&1 != 0 || !hasWill && (willQoS > 0 || willRetain) || willQoS == 3 || version == packet.V311 && hasPassword && !hasUser {
		return malformed("CONNECT has the invalid flags 0x%02X", flags)
	}
	var will nsq.Will
	var willTopic []byte
	var willProperties properties
	if hasWill {
		if version == packet.V5 {
			if err := readProperties(r, 0, &willProperties); err != nil {
				return err
			}
			will.Delay = seconds(willProperties.values[packet.WillDelay])
		}
		willTopic, will.Body, will.QoS = r.Text(), r.Binary(), willQoS
	}
	if hasUser {
		c.UserName = string(r.Text())
	}
	if hasPassword {
		c.Password = append([]byte{}, r.Binary()...)
	}
	if r.Failed || len(r.Rest) > 0 {
		return misfit(packet.Connect)
	}
	switch {
	case len(id) > nsq.MaxIdentityText:
		return &Error{Reason: BadClientID, Text: "the client id is longer than 256 bytes"}
	case len(id) == 0 && version == packet.V311 && !c.CleanStart:
		return &Error{Reason: BadClientID, Text: "a session without client id cannot be kept"}
	case p.has(packet.AuthMethod):
		return &Error{Reason: BadAuthMethod, Text: "the server has no authentication methods"}
	case p.has(packet.AuthData):
		return violation("authentication data without a method")
	case willRetain && version == packet.V5:
		return &Error{Reason: RetainUnsupported, Text: "the server retains no messages"}
	case willQoS == 2:
		return &Error{Reason: QoSUnsupported, Text: "the server has no QoS 2"}
	}
	c.ClientID = string(id)
	s.clientID = c.ClientID
	if hasWill {
		if err := s.mapWill(&will, willTopic, willProperties.arena); err != nil {
			return err
		}
		c.Will = &will
	}
	switch {
	case version == packet.V5:
		c.Expiry = seconds(p.values[packet.SessionExpiry])
	case !c.CleanStart:
		c.Expiry = math.MaxInt64
	}
	s.shortened = c.Expiry > s.cfg.MaxSessionExpiry
	c.Expiry = min(c.Expiry, s.cfg.MaxSessionExpiry)
	s.expiry = c.Expiry
	s.window = uint16(s.cfg.MaxInflight)
	if p.has(packet.ReceiveMaximum) {
		s.window = min(s.window, uint16(p.values[packet.ReceiveMaximum]))
	}
	s.maxPacket = math.MaxInt32
	if p.has(packet.MaximumPacket) {
		s.maxPacket = int32(min(p.values[packet.MaximumPacket], math.MaxInt32))
	}
	c.Redirect = p.redirect && s.maxPacket >= maxReferral
	s.extra.Connect = c
	op.Kind, op.MQTT = nsq.OpConnect, &s.extra
	s.state = connecting
	return nil
}

// seconds converts an interval of the protocol, whose maximum means forever.
func seconds(v uint32) time.Duration {
	if v == math.MaxUint32 {
		return math.MaxInt64
	}
	return time.Duration(v) * time.Second
}

// mapWill sets the target of a will.
func (s *Session) mapWill(w *nsq.Will, name, forwarded []byte) *Error {
	if err := names.CheckName(name); err != nil {
		return &Error{Reason: BadTopicName, Text: "the will's topic name " + err.Error()}
	}
	target, _, ok := s.rules.Map(name, nil)
	if !ok {
		return &Error{Reason: BadTopicName, Text: "no rule maps the will's topic name to a topic"}
	}
	w.Topic, w.Publisher = string(target.Topic), string(target.Publisher)
	a := names.Attribute{Name: name, Envelope: target.Envelope, AtMostOnce: w.QoS == 0, Properties: forwarded}
	if !a.Fits() {
		a.Properties = nil
	}
	w.Attribute = a.Append(nil)
	w.Body = append([]byte{}, w.Body...)
	if target.Envelope {
		w.Body = s.appendEnvelope(nil, name, w.Body)
	}
	return nil
}

// answerConnect ends the connecting state.
func (s *Session) answerConnect(c *nsq.Connect, err error) {
	if err != nil {
		s.close(errorOf(err))
		return
	}
	if c.ClientID == "" {
		panic("session: CONNECT accepted without a client id")
	}
	assigned := s.clientID == ""
	s.clientID = c.ClientID
	s.channel = names.ClientChannel(s.clientID, s.expiry == 0 && !c.Present)
	s.resolveAll()
	s.state = open
	s.out = appendPacket(s.out, packet.Connack, func(dst []byte) []byte {
		present := byte(0)
		if c.Present {
			present = 1
		}
		dst = append(dst, present, byte(Success))
		if s.version != packet.V5 {
			return dst
		}
		return appendSized(dst, func(dst []byte) []byte { return s.appendGrants(dst, assigned) })
	})
}

// appendGrants appends the properties of CONNACK. Wildcards, shared subscriptions and subscription
// identifiers are available by default.
func (s *Session) appendGrants(dst []byte, assigned bool) []byte {
	if s.shortened {
		dst = binary.BigEndian.AppendUint32(append(dst, byte(packet.SessionExpiry)), uint32(s.expiry/time.Second))
	}
	dst = binary.BigEndian.AppendUint16(append(dst, byte(packet.ReceiveMaximum)), uint16(s.cfg.MaxInflight))
	dst = append(dst, byte(packet.MaximumQoS), 1, byte(packet.RetainAvailable), 0)
	dst = binary.BigEndian.AppendUint32(append(dst, byte(packet.MaximumPacket)), uint32(s.cfg.MaxPacketSize))
	if assigned {
		dst = packet.AppendText(append(dst, byte(packet.AssignedClient)), s.clientID)
	}
	if s.cfg.MaxAliases > 0 {
		dst = binary.BigEndian.AppendUint16(append(dst, byte(packet.AliasMaximum)), uint16(s.cfg.MaxAliases))
	}
	return dst
}

// refuseConnect appends the CONNACK for e, if the client's version has one.
func (s *Session) refuseConnect(e *Error) {
	if s.version == packet.V5 {
		s.out = appendPacket(s.out, packet.Connack, func(dst []byte) []byte {
			return s.appendReason(append(dst, 0, byte(e.Reason)), e.Text, e.ServerReference)
		})
		return
	}
	code := byte(3) // server unavailable
	switch e.Reason {
	case Malformed, ProtocolError, PacketTooLarge:
		return
	case UnsupportedVersion:
		code = 1
	case BadClientID:
		code = 2
	case BadUserOrPassword:
		code = 4
	case NotAuthorized, BadTopicName, QoSUnsupported:
		code = 5
	}
	s.out = append(s.out, byte(packet.Connack), 2, 0, code)
}

// disconnect decodes a DISCONNECT.
func (s *Session) disconnect(r *packet.Reader, op *nsq.Op) *Error {
	reason, p := Success, properties{}
	if s.version == packet.V5 && len(r.Rest) > 0 {
		reason = Reason(r.Byte())
		if len(r.Rest) > 0 {
			if err := readProperties(r, packet.Disconnect, &p); err != nil {
				return err
			}
		}
	}
	if r.Failed || len(r.Rest) > 0 {
		return misfit(packet.Disconnect)
	}
	if p.has(packet.SessionExpiry) {
		expiry := seconds(p.values[packet.SessionExpiry])
		if s.expiry == 0 && expiry > 0 {
			return violation("DISCONNECT keeps a session that CONNECT did not keep")
		}
		s.expiry = min(expiry, s.cfg.MaxSessionExpiry)
	}
	s.extra.PublishWill, s.extra.SessionExpiry = reason != Success, s.expiry
	op.Kind, op.MQTT = nsq.OpDisconnect, &s.extra
	return nil
}
