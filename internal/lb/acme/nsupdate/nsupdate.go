// Package nsupdate sets TXT records of zones by dynamic updates (RFC 2136) that a key signs (TSIG, RFC 8945).
package nsupdate

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
)

const (
	// timeout bounds a question to a server, and fudge is how far the clocks may differ, in seconds.
	timeout = 5 * time.Second
	fudge   = 300
	// ttl of a record, in seconds.
	ttl = 60
	// poll is how often a server is asked whether it has a record.
	poll = 500 * time.Millisecond
)

// Zone is a zone that may be updated.
type Zone struct {
	// Name has no dot at its end.
	Name string
	// Servers are the zone's own, as HOST:PORT. The first is updated, and all of them must have a record.
	Servers []string
}

// ParseZone reads ZONE=SERVER[,SERVER...], where a server is HOST[:PORT].
func ParseZone(text string) (Zone, error) {
	name, list, _ := strings.Cut(text, "=")
	name = strings.TrimSuffix(strings.ToLower(name), ".")
	if _, ok := dns.IsDomainName(name); !ok || name == "" || strings.ContainsAny(name, "*\\ ") {
		return Zone{}, fmt.Errorf("%q is not a zone", name)
	}
	z := Zone{Name: name}
	for server := range strings.SplitSeq(list, ",") {
		host, port, err := net.SplitHostPort(server)
		if err != nil {
			host, port = strings.Trim(server, "[]"), "53"
		}
		if host == "" || strings.ContainsAny(host, " /") {
			return Zone{}, fmt.Errorf("%q is not HOST or HOST:PORT", server)
		}
		z.Servers = append(z.Servers, net.JoinHostPort(host, port))
	}
	return z, nil
}

// Key signs updates.
type Key struct {
	Name, Algorithm string // fully qualified
	secret          string // base64
}

var (
	keyForm = regexp.MustCompile(`(?s)^\s*key\s+"?([A-Za-z0-9._-]+)"?\s*\{(.*)\}\s*;\s*$`)
	option  = regexp.MustCompile(`(algorithm|secret)\s+"?([A-Za-z0-9+/=._-]+)"?\s*;`)
)

// ParseKey reads a key as tsig-keygen writes it. An error has no part of the secret.
func ParseKey(text string) (Key, error) {
	form := keyForm.FindStringSubmatch(text)
	if form == nil {
		return Key{}, errors.New(`it is not key "NAME" { algorithm NAME; secret "BASE64"; };`)
	}
	k := Key{Name: dns.CanonicalName(form[1])}
	for _, o := range option.FindAllStringSubmatch(form[2], -1) {
		if o[1] == "secret" {
			k.secret = o[2]
		} else {
			k.Algorithm = dns.CanonicalName(o[2])
		}
	}
	if !slices.Contains([]string{dns.HmacSHA224, dns.HmacSHA256, dns.HmacSHA384, dns.HmacSHA512}, k.Algorithm) {
		return Key{}, fmt.Errorf("its algorithm is %q; want hmac-sha256, or another of SHA-2", k.Algorithm)
	}
	if secret, err := base64.StdEncoding.DecodeString(k.secret); err != nil || len(secret) < 16 {
		return Key{}, errors.New("its secret is not 16 bytes or more in base64")
	}
	return k, nil
}

// Updater updates zones. It is safe for concurrent use.
type Updater struct {
	zones []Zone
	key   Key
}

// New returns an Updater of zones.
func New(zones []Zone, key Key) *Updater { return &Updater{zones, key} }

// zone returns the zone that a name is in, nil if it is in none.
func (u *Updater) zone(name string) (found *Zone) {
	for i := range u.zones {
		z := &u.zones[i]
		if (name == z.Name || strings.HasSuffix(name, "."+z.Name)) && (found == nil || len(z.Name) > len(found.Name)) {
			found = z
		}
	}
	return found
}

// Has reports whether a name is in one of the zones.
func (u *Updater) Has(name string) bool { return u != nil && u.zone(name) != nil }

// Add adds a TXT record to a name, whose other records stay.
func (u *Updater) Add(ctx context.Context, name, value string) error {
	return u.update(ctx, name, value, (*dns.Msg).Insert)
}

// Remove removes a TXT record, and leaves others of the name.
func (u *Updater) Remove(ctx context.Context, name, value string) error {
	return u.update(ctx, name, value, (*dns.Msg).Remove)
}

func (u *Updater) update(ctx context.Context, name, value string, change func(*dns.Msg, []dns.RR)) error {
	z := u.zone(name)
	if z == nil {
		return fmt.Errorf("%s is in no zone that may be updated", name)
	}
	m := new(dns.Msg)
	m.SetUpdate(dns.Fqdn(z.Name))
	change(m, []dns.RR{&dns.TXT{
		Hdr: dns.RR_Header{Name: dns.Fqdn(name), Rrtype: dns.TypeTXT, Class: dns.ClassINET, Ttl: ttl}, Txt: []string{value}}})
	m.SetTsig(u.key.Name, u.key.Algorithm, fudge, time.Now().Unix())
	c := dns.Client{Net: "tcp", Timeout: timeout, TsigSecret: map[string]string{u.key.Name: u.key.secret}}
	answer, _, err := c.ExchangeContext(ctx, m, z.Servers[0])
	switch {
	case err != nil:
		return fmt.Errorf("update of zone %s: %w", z.Name, err)
	case answer.Rcode != dns.RcodeSuccess:
		return fmt.Errorf("update of zone %s: the server answers %s", z.Name, dns.RcodeToString[answer.Rcode])
	case answer.IsTsig() == nil:
		return fmt.Errorf("update of zone %s: the answer is not signed", z.Name)
	}
	return nil
}

// Await waits until all servers of a name's zone have a TXT record, or returns which has not when ctx ends.
func (u *Updater) Await(ctx context.Context, name, value string) error {
	z := u.zone(name)
	if z == nil {
		return fmt.Errorf("%s is in no zone that may be updated", name)
	}
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for _, server := range z.Servers {
		for {
			has, err := hasRecord(ctx, server, name, value)
			if has {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("server %s of zone %s does not have the record of %s in time: %w", server, z.Name, name, errors.Join(err, ctx.Err()))
			case <-tick.C:
			}
		}
	}
	return nil
}

func hasRecord(ctx context.Context, server, name, value string) (bool, error) {
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), dns.TypeTXT)
	c := dns.Client{Net: "tcp", Timeout: timeout}
	answer, _, err := c.ExchangeContext(ctx, m, server)
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(answer.Answer, func(r dns.RR) bool {
		t, ok := r.(*dns.TXT)
		return ok && strings.Join(t.Txt, "") == value
	}), nil
}
