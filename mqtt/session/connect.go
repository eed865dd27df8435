package session

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/srtm-io/srtm/mqtt/names"
	nsq "github.com/srtm-io/srtm/nsq/session"
)

// Protocol levels.
const (
	version311 = 4
	version5   = 5
)

// connect decodes a CONNECT.
func (s *Session) connect(r *reader, op *nsq.Op) *Error {
	protocol, version := r.binary(), r.byte()
	switch {
	case r.failed || string(protocol) != "MQTT" && string(protocol) != "MQIsdp":
		return malformed("CONNECT does not begin with the protocol name MQTT")
	case string(protocol) != "MQTT" || version < version311:
		s.version = version311 // for the form of the refusal
		return &Error{Reason: UnsupportedVersion, Text: "the client speaks a version before MQTT 3.1.1"}
	case version > version5:
		s.version = version5
		return &Error{Reason: UnsupportedVersion, Text: "the client speaks a version after MQTT 5.0"}
	}
	s.version, s.connectedAt = version, s.wall
	c := &nsq.Connect{Version: version}
	flags := r.byte()
	c.CleanStart = flags&2 != 0
	s.keepAlive = time.Duration(r.uint16()) * time.Second
	var p properties
	if version == version5 {
		if err := r.properties(connect, &p); err != nil {
			return err
		}
	}
	s.terse = p.has(problemInfo) && p.values[problemInfo] == 0 || p.has(maximumPacket) && p.values[maximumPacket] < 2*maxReasonText
	id := r.text()
	hasWill, willQoS, willRetain := flags&4 != 0, flags>>3&3, flags&32 != 0
	hasUser, hasPassword := flags&128 != 0, flags&64 != 0
	if flags&1 != 0 || !hasWill && (willQoS > 0 || willRetain) || willQoS == 3 || version == version311 && hasPassword && !hasUser {
		return malformed("CONNECT has the invalid flags 0x%02X", flags)
	}
	var will nsq.Will
	var willTopic []byte
	var willProperties properties
	if hasWill {
		if version == version5 {
			if err := r.properties(0, &willProperties); err != nil {
				return err
			}
			will.Delay = seconds(willProperties.values[willDelay])
		}
		willTopic, will.Body, will.QoS = r.text(), r.binary(), willQoS
	}
	if hasUser {
		c.UserName = string(r.text())
	}
	if hasPassword {
		c.Password = append([]byte{}, r.binary()...)
	}
	if r.failed || len(r.rest) > 0 {
		return misfit(connect)
	}
	switch {
	case len(id) > nsq.MaxIdentityText:
		return &Error{Reason: BadClientID, Text: "the client id is longer than 256 bytes"}
	case len(id) == 0 && version == version311 && !c.CleanStart:
		return &Error{Reason: BadClientID, Text: "a session without client id cannot be kept"}
	case p.has(authMethod):
		return &Error{Reason: BadAuthMethod, Text: "the server has no authentication methods"}
	case p.has(authData):
		return violation("authentication data without a method")
	case willRetain && version == version5:
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
	case version == version5:
		c.Expiry = seconds(p.values[sessionExpiry])
	case !c.CleanStart:
		c.Expiry = math.MaxInt64
	}
	s.shortened = c.Expiry > s.cfg.MaxSessionExpiry
	c.Expiry = min(c.Expiry, s.cfg.MaxSessionExpiry)
	s.expiry = c.Expiry
	if limit := s.cfg.MaxKeepAlive; version == version5 && limit > 0 && (s.keepAlive == 0 || s.keepAlive > limit) {
		s.keepAlive, s.ownKeepAlive = limit, true
	}
	c.KeepAlive, c.Redirect = s.keepAlive, p.redirect
	s.window = uint16(s.cfg.MaxInflight)
	if p.has(receiveMaximum) {
		s.window = min(s.window, uint16(p.values[receiveMaximum]))
	}
	s.maxPacket = math.MaxInt32
	if p.has(maximumPacket) {
		s.maxPacket = int32(min(p.values[maximumPacket], math.MaxInt32))
	}
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
	s.out = appendPacket(s.out, connack, func(dst []byte) []byte {
		present := byte(0)
		if c.Present {
			present = 1
		}
		dst = append(dst, present, byte(Success))
		if s.version != version5 {
			return dst
		}
		return appendSized(dst, func(dst []byte) []byte { return s.appendGrants(dst, assigned) })
	})
}

// appendGrants appends the properties of CONNACK. Wildcards, shared subscriptions and subscription
// identifiers are available by default.
func (s *Session) appendGrants(dst []byte, assigned bool) []byte {
	if s.shortened {
		dst = binary.BigEndian.AppendUint32(append(dst, byte(sessionExpiry)), uint32(s.expiry/time.Second))
	}
	dst = binary.BigEndian.AppendUint16(append(dst, byte(receiveMaximum)), uint16(s.cfg.MaxInflight))
	dst = append(dst, byte(maximumQoS), 1, byte(retainAvailable), 0)
	dst = binary.BigEndian.AppendUint32(append(dst, byte(maximumPacket)), uint32(s.cfg.MaxPacketSize))
	if assigned {
		dst = appendText(append(dst, byte(assignedClient)), s.clientID)
	}
	if s.cfg.MaxAliases > 0 {
		dst = binary.BigEndian.AppendUint16(append(dst, byte(aliasMaximum)), uint16(s.cfg.MaxAliases))
	}
	if s.ownKeepAlive {
		dst = binary.BigEndian.AppendUint16(append(dst, byte(serverKeepAlive)), uint16(s.keepAlive/time.Second))
	}
	return dst
}

// refuseConnect appends the CONNACK for e, if the client's version has one.
func (s *Session) refuseConnect(e *Error) {
	if s.version == version5 {
		s.out = appendPacket(s.out, connack, func(dst []byte) []byte {
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
	s.out = append(s.out, byte(connack)<<4, 2, 0, code)
}

// disconnect decodes a DISCONNECT.
func (s *Session) disconnect(r *reader, op *nsq.Op) *Error {
	reason, p := Success, properties{}
	if s.version == version5 && len(r.rest) > 0 {
		reason = Reason(r.byte())
		if len(r.rest) > 0 {
			if err := r.properties(disconnect, &p); err != nil {
				return err
			}
		}
	}
	if r.failed || len(r.rest) > 0 {
		return misfit(disconnect)
	}
	if p.has(sessionExpiry) {
		expiry := seconds(p.values[sessionExpiry])
		if s.expiry == 0 && expiry > 0 {
			return violation("DISCONNECT keeps a session that CONNECT did not keep")
		}
		s.expiry = min(expiry, s.cfg.MaxSessionExpiry)
	}
	s.extra.PublishWill, s.extra.SessionExpiry = reason != Success, s.expiry
	op.Kind, op.MQTT = nsq.OpDisconnect, &s.extra
	return nil
}
