package envoyauth

import (
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// Method is the path of the call.
const Method = "/envoy.service.auth.v3.Authorization/Check"

// Request is what a server gets of a request (CheckRequest).
type Request struct {
	ID, Method, Host, Scheme string
	// Target is the path with the query, and Protocol as "HTTP/1.1".
	Target, Protocol string
	// Fields are the values of header fields by their names in lower case; several are joined by commas.
	Fields map[string]string
	Began  time.Time
	// Size is the length of the body, -1 if it is not known. Body is nil unless the server gets it.
	Size int64
	Body []byte
	// Client is where the request comes from, At where it has come to, Principal the subject of the client's certificate, and
	// ServerName what the client has asked for the certificate by; "" without one.
	Client, At            netip.AddrPort
	Principal, ServerName string
}

// The numbers of the fields in use.
const (
	checkAttributes = 1 // of CheckRequest

	attributesSource      = 1 // of AttributeContext
	attributesDestination = 2
	attributesRequest     = 4
	attributesTLS         = 12

	peerAddress   = 1 // of AttributeContext.Peer
	peerPrincipal = 4

	addressSocket = 1 // of config.core.v3.Address

	socketAddress = 2 // of config.core.v3.SocketAddress
	socketPort    = 3

	requestTime = 1 // of AttributeContext.Request
	requestHTTP = 2

	tlsName = 1 // of AttributeContext.TLSSession

	httpID       = 1 // of AttributeContext.HttpRequest
	httpMethod   = 2
	httpHeaders  = 3
	httpPath     = 4
	httpHost     = 5
	httpScheme   = 6
	httpSize     = 9
	httpProtocol = 10
	httpBody     = 11
	httpRawBody  = 12

	entryKey   = 1 // of a map
	entryValue = 2

	timeSeconds = 1 // of google.protobuf.Timestamp
	timeNanos   = 2
)

// framing is how many bytes come before a message of gRPC: whether it is compressed, and its length.
const framing = 5

// Message returns the message as gRPC sends it.
func (r *Request) Message() []byte {
	var attributes message
	attributes.message(attributesSource, peer(r.Client, r.Principal))
	attributes.message(attributesDestination, peer(r.At, ""))
	var request message
	request.message(requestTime, timestamp(r.Began))
	request.message(requestHTTP, r.http())
	attributes.message(attributesRequest, request)
	if r.ServerName != "" {
		var session message
		session.text(tlsName, r.ServerName)
		attributes.message(attributesTLS, session)
	}
	out := make(message, framing)
	out.message(checkAttributes, attributes)
	binary.BigEndian.PutUint32(out[1:], uint32(len(out)-framing)) //nolint:gosec // what a request may have is bounded
	return out
}

func (r *Request) http() (out message) {
	out.text(httpID, r.ID)
	out.text(httpMethod, r.Method)
	for _, name := range slices.Sorted(maps.Keys(r.Fields)) {
		var entry message
		entry.text(entryKey, name)
		entry.text(entryValue, r.Fields[name])
		out.message(httpHeaders, entry)
	}
	out.text(httpPath, r.Target)
	out.text(httpHost, r.Host)
	out.text(httpScheme, r.Scheme)
	out.number(httpSize, uint64(r.Size)) //nolint:gosec // as the format has it
	out.text(httpProtocol, r.Protocol)
	switch {
	case len(r.Body) == 0:
	case utf8.Valid(r.Body):
		out.text(httpBody, string(r.Body))
	default:
		out.message(httpRawBody, r.Body)
	}
	return out
}

func peer(at netip.AddrPort, principal string) (out message) {
	var socket, address message
	socket.text(socketAddress, at.Addr().Unmap().WithZone("").String())
	socket.number(socketPort, uint64(at.Port()))
	address.message(addressSocket, socket)
	out.message(peerAddress, address)
	out.text(peerPrincipal, principal)
	return out
}

func timestamp(t time.Time) (out message) {
	out.number(timeSeconds, uint64(t.Unix()))     //nolint:gosec // after 1970
	out.number(timeNanos, uint64(t.Nanosecond())) //nolint:gosec // not negative
	return out
}

// message is a message of protobuf in its wire format.
type message []byte

// text adds a field. A text in protobuf is UTF-8: other bytes become U+FFFD.
func (m *message) text(n protowire.Number, v string) {
	if v != "" {
		*m = protowire.AppendString(protowire.AppendTag(*m, n, protowire.BytesType), strings.ToValidUTF8(v, "\ufffd"))
	}
}

func (m *message) number(n protowire.Number, v uint64) {
	if v != 0 {
		*m = protowire.AppendVarint(protowire.AppendTag(*m, n, protowire.VarintType), v)
	}
}

func (m *message) message(n protowire.Number, v []byte) {
	*m = protowire.AppendBytes(protowire.AppendTag(*m, n, protowire.BytesType), v)
}
