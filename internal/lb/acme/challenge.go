package acme

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"golang.org/x/crypto/acme"

	"github.com/fairlead/fairlead/internal/dialect"
)

// dnsPropagation is how long the servers of a zone have to serve a record.
const dnsPropagation = time.Minute

// challenge is an open one.
type challenge struct {
	uri string // of its authorization
	of  *acme.Challenge
	// entry and text are what the Secret has meanwhile, if anything.
	entry string
	text  []byte
	// answers reports whether an address answers it; nil if addresses do not.
	answers func(ctx context.Context, at string) bool
	// record is the name of the TXT record with the value that a zone has meanwhile, empty for none.
	record, value string
}

// kindOf returns the type of challenge that a Service asks for.
func kindOf(it *item) string {
	if it.Challenge == "" {
		return dialect.TLSALPN01
	}
	return it.Challenge
}

// prepare returns what proves that a host is the Service's, by a challenge that the authority offers.
func prepare(c *acme.Client, z *acme.Authorization, uri, kind string) (*challenge, error) {
	host := z.Identifier.Value
	i := slices.IndexFunc(z.Challenges, func(o *acme.Challenge) bool { return o.Type == kind })
	if i < 0 {
		return nil, fmt.Errorf("%s: the authority does not offer %s", host, kind)
	}
	out := &challenge{uri: uri, of: z.Challenges[i]}
	token := out.of.Token
	switch kind {
	case dialect.HTTP01:
		text, err := c.HTTP01ChallengeResponse(token)
		if err != nil || !isToken(token) {
			return nil, fmt.Errorf("%s: the authority's token cannot be used: %w", host, err)
		}
		out.entry, out.text = tokenEntry+token, []byte(text)
		out.answers = func(ctx context.Context, at string) bool {
			return answersHTTP(ctx, at, host, c.HTTP01ChallengePath(token), text)
		}
	case dialect.DNS01:
		value, err := c.DNS01ChallengeRecord(token)
		out.record, out.value = recordOf(host), value
		return out, err
	default:
		cert, err := c.TLSALPN01ChallengeCert(token, host)
		if err != nil {
			return nil, err
		}
		text, key, err := encode(cert.Certificate, cert.PrivateKey)
		if err != nil {
			return nil, err
		}
		out.entry, out.text = challengeEntry+host, append(text, key...)
		out.answers = func(ctx context.Context, at string) bool { return answersTLS(ctx, at, host, cert) }
	}
	return out, nil
}

// recordOf returns the name of the record that DNS-01 asks for.
func recordOf(host string) string { return "_acme-challenge." + strings.TrimPrefix(host, "*.") }

// present has challenges answered, and waits until they are. What it returns undoes it.
func (m *Manager) present(ctx context.Context, it *item, o *owner, st *state, open []*challenge) (undo func(), err error) {
	st.challenges = map[string][]byte{}
	undo = func() {}
	for _, ch := range open {
		if ch.entry != "" {
			st.challenges[ch.entry] = ch.text
		}
	}
	if len(st.challenges) > 0 {
		if err := m.apply(ctx, o, it, st); err != nil {
			return undo, err
		}
		m.awaitAnswers(ctx, o, open)
	}
	records := slices.DeleteFunc(slices.Clone(open), func(ch *challenge) bool { return ch.record == "" })
	if len(records) == 0 {
		return undo, nil
	}
	undo = func() { m.withdraw(ctx, o, records) }
	for _, ch := range records {
		if err := m.o.DNS.Add(ctx, ch.record, ch.value); err != nil {
			return undo, m.zoneError(o, err)
		}
	}
	limited, cancel := context.WithTimeout(ctx, dnsPropagation)
	defer cancel()
	for _, ch := range records {
		if err := m.o.DNS.Await(limited, ch.record, ch.value); err != nil {
			return undo, m.zoneError(o, err)
		}
	}
	return undo, nil
}

// errZone is an error of the administrator's servers.
var errZone = errors.New("the zone cannot be updated, or its servers do not have the record in time: see the log of the controller")

// zoneError logs an error of a zone. Its text, which has the servers' addresses, only goes to the log: tenants read the Event.
func (m *Manager) zoneError(o *owner, err error) error {
	m.o.Log.Warn("cannot set the record of a challenge", "service", o.name, "err", err)
	return errZone
}

// withdraw removes the records of challenges, also when ctx has ended.
func (m *Manager) withdraw(ctx context.Context, o *owner, records []*challenge) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	for _, ch := range records {
		if err := m.o.DNS.Remove(ctx, ch.record, ch.value); err != nil {
			m.o.Log.Warn("cannot remove the record of a challenge", "service", o.name, "record", ch.record, "err", err)
		}
	}
}

// proves reports whether a namespace may have a host certified by DNS-01. The other challenges prove that the host leads to the
// Service; this one only that the zone is ours. So the host must be of this namespace only, and with * all names that it covers.
func proves(domains []Domain, namespace, host string) bool {
	base, wild := strings.CutPrefix(host, "*.")
	only := func(d Domain) bool {
		return len(d.Namespaces) > 0 && !slices.ContainsFunc(d.Namespaces, func(n string) bool { return n != namespace })
	}
	closest := ""
	for _, d := range domains {
		if within(base, d.Name) && len(d.Name) > len(closest) {
			closest = d.Name
		}
	}
	for _, d := range domains {
		if (d.Name == closest || wild && within(d.Name, base)) && !only(d) {
			return false
		}
	}
	return closest != ""
}

// refusal returns why a Service may not have a host, empty if it may.
func (m *Manager) refusal(it *item, namespace, host string) string {
	switch {
	case !allows(m.o.Domains, namespace, host):
		return "namespace " + namespace + " may not have one for " + host + " (--lb-acme-domain)"
	case it.Challenge != dialect.DNS01:
		return ""
	case !m.o.DNS.Has(strings.TrimPrefix(host, "*.")):
		return host + " is in no zone for dns-01 (--lb-acme-dns-zone)"
	case !proves(m.o.Domains, namespace, host):
		return "by dns-01 namespace " + namespace + " may only have one for a domain that is of no other namespace, which " + host +
			" is not (--lb-acme-domain)"
	}
	return ""
}

// awaitAnswers waits until the addresses of a Service answer challenges, or Propagation has passed.
func (m *Manager) awaitAnswers(ctx context.Context, o *owner, open []*challenge) {
	ctx, cancel := context.WithTimeout(ctx, m.o.Propagation)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		missing := false
		for _, at := range o.addresses {
			for _, ch := range open {
				missing = missing || ch.answers != nil && !ch.answers(ctx, at)
			}
		}
		if !missing {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func answersTLS(ctx context.Context, at, host string, cert tls.Certificate) bool {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	d := tls.Dialer{Config: &tls.Config{ServerName: host, NextProtos: []string{acme.ALPNProto}, MinVersion: tls.VersionTLS12,
		InsecureSkipVerify: true}} //nolint:gosec // the certificate is compared below
	conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort(at, "443"))
	if err != nil {
		return false
	}
	defer conn.Close()
	got := conn.(*tls.Conn).ConnectionState().PeerCertificates
	return len(got) > 0 && string(got[0].Raw) == string(cert.Certificate[0])
}

func answersHTTP(ctx context.Context, at, host, path, text string) bool {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(at, "80")+path, nil)
	if err != nil {
		return false
	}
	request.Host = host
	transport := &http.Transport{DisableKeepAlives: true}
	answer, err := transport.RoundTrip(request)
	if err != nil {
		return false
	}
	defer answer.Body.Close()
	got, err := io.ReadAll(io.LimitReader(answer.Body, 2*maxToken))
	return err == nil && string(got) == text
}
