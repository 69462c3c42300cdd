package conntrack

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/sysctl"
)

// Settings are parameters of the connection tracking of the calling thread's
// network namespace. A zero field does not change its parameter.
type Settings struct {
	// Max is how many connections there can be. It belongs to the whole
	// machine, and can only be set where that is at home; 0 in any other
	// network namespace is no loss.
	Max int
	// TCPBeLiberal lets packets outside of the TCP window count as valid.
	TCPBeLiberal bool
	// Accounting has packets and bytes counted for each connection that begins after that.
	Accounting bool
	// The times after which a connection without packets is forgotten, in whole
	// seconds.
	TCPEstablished, TCPCloseWait, UDP, UDPStream time.Duration
}

const (
	parameters   = "net/netfilter/nf_conntrack_"
	beLiberal    = parameters + "tcp_be_liberal"
	hashSizeFile = "/sys/module/nf_conntrack/parameters/hashsize"
	// perBucket is how many connections a bucket of the hash table is for;
	// kube-proxy's.
	perBucket = 4
)

// UDPTimeout returns how long a flow of UDP that has not lasted is remembered, in the
// calling thread's network namespace.
func UDPTimeout() time.Duration {
	if b, err := os.ReadFile("/proc/sys/" + parameters + "udp_timeout"); err == nil {
		if s, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
			return time.Duration(s) * time.Second
		}
	}
	return defaultUDPTimeout
}

// defaultUDPTimeout is Linux's.
const defaultUDPTimeout = 30 * time.Second

// Set sets the parameters, each by itself, and joins the errors.
func (s *Settings) Set() error {
	var errs []error
	if s.Max > 0 {
		errs = append(errs, setMax(s.Max))
	}
	if s.TCPBeLiberal {
		errs = append(errs, sysctl.Set(beLiberal, "1"))
	}
	if s.Accounting {
		errs = append(errs, sysctl.Set(accounting, "1"))
	}
	for _, t := range []struct {
		name  string
		value time.Duration
	}{
		{"tcp_timeout_established", s.TCPEstablished},
		{"tcp_timeout_close_wait", s.TCPCloseWait},
		{"udp_timeout", s.UDP},
		{"udp_timeout_stream", s.UDPStream},
	} {
		if t.value > 0 {
			errs = append(errs, sysctl.Set(parameters+t.name, strconv.Itoa(int(t.value/time.Second))))
		}
	}
	return errors.Join(errs...)
}

// setMax sets the limit, and the hash table so that it serves it.
func setMax(n int) error {
	if err := sysctl.Set(parameters+"max", strconv.Itoa(n)); err != nil {
		return err
	}
	b, err := os.ReadFile(hashSizeFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // this kernel grows it by itself, or not at all
	}
	if size, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && size >= n/perBucket {
		return nil
	}
	if err := sysctl.SetFile(hashSizeFile, strconv.Itoa(n/perBucket), "/proc/sys/"+parameters+"buckets"); err != nil {
		return fmt.Errorf("%w; connections work all the same, new ones more slowly the more there are", err)
	}
	return nil
}

// BeLiberal reports whether packets outside of the TCP window count as valid.
func BeLiberal() bool {
	b, err := os.ReadFile("/proc/sys/" + beLiberal)
	v := strings.TrimSpace(string(b))
	return err == nil && v != "0"
}

// Max is how many connections kube-proxy would allow: perCore for each of the
// processors, at least least; 0, which changes nothing, if perCore is 0.
func Max(perCore, least, processors int) int {
	if perCore <= 0 {
		return 0
	}
	return max(perCore*processors, least)
}
