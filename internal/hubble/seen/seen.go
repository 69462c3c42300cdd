// Package seen has what components show to whoever records flows: requests of HTTP, and questions of DNS. A component asks first
// whether the next one is wanted, so that the others cost next to nothing.
package seen

import (
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/svc"
)

// Request is a request of HTTP that has ended.
type Request struct {
	// Service has Pod, or is the one that the client has asked for.
	Service svc.Name
	// Client is where the request came from, and At where to. Pod has answered it; it is invalid if the proxy has.
	Client, At, Pod netip.AddrPort
	// Method, Host and Target are the client's words, of any length. Protocol is HTTP/1.0, HTTP/1.1 or HTTP/2.
	Method, Host, Target, Protocol string
	Secure                         bool // by TLS
	Status                         int  // to the client
	// Began is when the request came. Answered is when its answer began, zero if that is unknown.
	Began, Answered time.Time
}

// Requests is shown requests. Many goroutines use it at a time.
type Requests interface {
	// Wants reports whether to show the request that begins now.
	Wants() bool
	Request(*Request)
}

// Question is a question of DNS that was answered.
type Question struct {
	Client, Server netip.AddrPort
	Protocol       svc.Protocol
	// Answer is the whole message. It does not change until Question returns.
	Answer []byte
	// Answered is the time of the answer, which took Latency.
	Answered time.Time
	Latency  time.Duration
}

// Questions is shown questions. Many goroutines use it at a time.
type Questions interface {
	// Wants reports whether to show the question that was just answered.
	Wants() bool
	Question(*Question)
}
