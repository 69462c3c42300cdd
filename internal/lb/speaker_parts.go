package lb

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/lb/announce"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// callTimeout bounds one call of the API server, which may have gone without an end of the connection.
const callTimeout = 5 * time.Second

// readKeys returns the keys of the speakers' messages: that of entry KeyEntry, which signs, and what else the Secret has,
// with which messages of others may be signed while the key is being replaced.
func (s *Speaker) readKeys(ctx context.Context) (keys [][]byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	secret, err := s.client.CoreV1().Secrets(Namespace).Get(ctx, KeyName, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(secret.Data)) {
		switch key := secret.Data[name]; {
		case name == KeyEntry && len(key) < KeyBytes:
			return nil, fmt.Errorf("its entry %s has fewer than %d bytes", KeyEntry, KeyBytes)
		case name == KeyEntry:
			keys = slices.Insert(keys, 0, key)
		case len(key) >= KeyBytes:
			keys = append(keys, key)
		}
	}
	if len(secret.Data[KeyEntry]) == 0 {
		return nil, fmt.Errorf("it has no entry %s", KeyEntry)
	}
	return keys[:min(len(keys), maxKeys)], nil
}

const (
	// keyPeriod is how often the Secret is read again.
	keyPeriod = time.Minute
	// maxKeys bounds the keys with which a message is compared.
	maxKeys = 4
)

// followKeys keeps the keys those of the Secret. Without it, they stay.
func (s *Speaker) followKeys(ctx context.Context) {
	tick := time.NewTicker(keyPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.refreshKeys(ctx)
		}
	}
}

func (s *Speaker) refreshKeys(ctx context.Context) {
	keys, err := s.readKeys(ctx)
	if err != nil || slices.EqualFunc(keys, *s.wire.keys.Load(), slices.Equal) {
		return
	}
	s.wire.keys.Store(&keys)
	s.log.Info("the keys of the speakers have changed", "keys", len(keys))
}

// firstKeys waits for the Secret with the speakers' key, which the controller makes.
func (s *Speaker) firstKeys(ctx context.Context) ([][]byte, error) {
	warned, pause := false, 100*time.Millisecond
	for begin := time.Now(); ; pause = min(2*pause, 2*time.Second) {
		keys, err := s.readKeys(ctx)
		switch {
		case err == nil:
			return keys, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		}
		if !warned && time.Since(begin) > 5*time.Second {
			warned = true
			s.log.Warn("cannot read the key of the speakers; retrying until it is there", "secret", Namespace+"/"+KeyName, "err", err)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(pause):
		}
	}
}

// health is what the node's proxy said last.
type health struct {
	mu     sync.Mutex
	ok     bool
	asked  bool
	reason string
}

func (h *health) get() (bool, string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.asked {
		return false, "the node's proxy was not asked for its health yet"
	}
	return h.ok, h.reason
}

// healthPeriod is how often the proxy is asked, and how long it may take to answer.
const healthPeriod = time.Second

// run asks until ctx ends.
func (h *health) run(ctx context.Context, ask func(context.Context) (bool, string), changed func()) {
	tick := time.NewTicker(healthPeriod)
	defer tick.Stop()
	for {
		limited, cancel := context.WithTimeout(ctx, healthPeriod)
		ok, reason := ask(limited)
		cancel()
		h.mu.Lock()
		different := !h.asked || h.ok != ok
		h.ok, h.reason, h.asked = ok, reason, true
		h.mu.Unlock()
		if different {
			changed()
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

var healthClient = &http.Client{Transport: &http.Transport{
	DisableKeepAlives: true, TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{},
}}

// askHealthz asks the proxy of this machine, fairlead's or kube-proxy.
func askHealthz(ctx context.Context) (bool, string) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:10256/healthz", nil)
	if err != nil {
		return false, err.Error()
	}
	answer, err := healthClient.Do(r)
	if err != nil {
		return false, fmt.Sprintf("the node's proxy does not answer: %v", err)
	}
	_ = answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return false, "the node's proxy reports that it is not healthy: " + answer.Status
	}
	return true, ""
}

// peerMACs are the hardware addresses of the cluster's speakers, those that have gone
// included: neighbours may still speak of them.
type peerMACs struct {
	mu   sync.RWMutex
	macs map[announce.MAC]time.Time // when it was last seen
}

func (p *peerMACs) has(m announce.MAC) bool {
	p.mu.RLock()
	defer p.mu.RUnlock()
	_, known := p.macs[m]
	return known
}

// forgetMAC is after how long the hardware address of a speaker that has gone is foreign.
const forgetMAC = time.Hour

func (p *peerMACs) learn(members []quorum.Member, links func(*quorum.Member) []memberLink) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.macs == nil {
		p.macs = map[announce.MAC]time.Time{}
	}
	now := time.Now()
	for i := range members {
		for _, l := range links(&members[i]) {
			if len(l.MAC) == len(announce.MAC{}) {
				p.macs[announce.MAC(l.MAC)] = now
			}
		}
	}
	for m, seen := range p.macs {
		if now.Sub(seen) > forgetMAC && len(p.macs) > len(members)*maxLinks {
			delete(p.macs, m)
		}
	}
}

// speakerMetrics are the metrics of a Speaker.
type speakerMetrics struct {
	owned, voters, reached prometheus.Gauge
	moves, conflicts, sent prometheus.Counter
	registry               *prometheus.Registry
}

func newSpeakerMetrics() *speakerMetrics {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: "fairlead_lb_speaker_" + name, Help: help})
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "fairlead_lb_speaker_" + name, Help: help})
	}
	m := &speakerMetrics{
		owned:     gauge("addresses", "Addresses that this node answers for."),
		voters:    gauge("voters", "Votes of the list in force."),
		reached:   gauge("voters_reached", "Voters whose promises count."),
		moves:     counter("taken_total", "Addresses that this node began to answer for."),
		conflicts: counter("conflicts_total", "Times that a foreign machine used an address."),
		sent:      counter("messages_sent_total", "Messages to other speakers."),
		registry:  prometheus.NewRegistry(),
	}
	m.registry.MustRegister(m.owned, m.voters, m.reached, m.moves, m.conflicts, m.sent)
	return m
}

// Collector returns the Speaker's metrics.
func (s *Speaker) Collector() prometheus.Collector { return s.metrics.registry }

func (s *Speaker) observe(now time.Duration) {
	owned := 0
	for _, o := range s.since {
		if !o.announced.IsZero() {
			owned++
		}
	}
	list := s.node.List()
	s.metrics.owned.Set(float64(owned))
	s.metrics.voters.Set(float64(list.Size()))
	s.metrics.reached.Set(float64(len(s.node.Reached(now))))
}

// speakerStatus writes the Speaker object.
type speakerStatus struct {
	// writing is held during flush, so that what is written last is the latest.
	writing sync.Mutex

	mu    sync.Mutex
	want  v1.SpeakerStatus
	dirty bool
	stale bool // what it announces has changed since want was made
}

// writePeriod is the least time between two writes of the Speaker object.
const writePeriod = 2 * time.Second

// poke records that what the speaker announces has changed.
func (t *speakerStatus) poke() {
	t.mu.Lock()
	t.stale = true
	t.mu.Unlock()
}

// report makes a new status if it may have changed.
func (s *Speaker) report(eligible bool, reason string) {
	confirmed := int64(s.node.Confirmed(s.o.Now()))
	t := &s.status
	t.mu.Lock()
	defer t.mu.Unlock()
	if confirmed == 0 {
		confirmed = t.want.VoterVersion // what it was before stays true
	}
	conditions := conflictConditions(s.announce.Conflicts(), t.want.Conditions)
	t.stale = t.stale || !slices.Equal(conditions, t.want.Conditions)
	if !t.stale && len(t.want.Endpoints) > 0 && t.want.Eligible == eligible && t.want.Reason == reason && t.want.VoterVersion == confirmed {
		return
	}
	t.stale = false
	next := v1.SpeakerStatus{
		Eligible: eligible, Reason: reason, Announce: s.o.Announce, VoterVersion: confirmed, Endpoints: []string{s.o.Peer.String()},
		Conditions: conditions,
	}
	next.VoterList = t.want.VoterList
	if list := s.node.List(); int64(list.Version) == confirmed {
		if text, err := json.Marshal(list); err == nil {
			next.VoterList = string(text)
		}
	}
	for _, l := range s.announce.Links() {
		for _, p := range l.Networks {
			if text := p.String(); !slices.Contains(next.Networks, text) {
				next.Networks = append(next.Networks, text)
			}
		}
	}
	s.reportInterfaces(&next)
	for addr, o := range s.since {
		if o.announced.IsZero() {
			continue
		}
		a := v1.AnnouncedAddress{Address: addr.String(), Via: "arp", Since: metav1.NewMicroTime(o.announced), Reason: o.reason}
		if addr.Is6() {
			a.Via = "ndp"
		}
		if where := s.announce.Where(addr); len(where) > 0 {
			a.Interface = where[0]
		}
		next.Addresses = append(next.Addresses, a)
	}
	s.routing.statusOf(&next)
	slices.SortStableFunc(next.Addresses, func(a, b v1.AnnouncedAddress) int {
		return netip.MustParseAddr(a.Address).Compare(netip.MustParseAddr(b.Address))
	})
	bound(&next)
	t.want, t.dirty = next, true
}

// conflictConditions returns the conditions of a speaker that hears of conflicts.
func conflictConditions(conflicts []announce.Conflict, before []metav1.Condition) []metav1.Condition {
	if len(conflicts) == 0 {
		return nil
	}
	var texts []string
	for _, c := range conflicts {
		text := fmt.Sprintf("%s at %s answers for %s", c.MAC, c.Interface, c.Addr)
		if c.Held {
			text += ", which is not announced meanwhile"
		}
		texts = append(texts, text)
	}
	out := slices.Clone(before)
	meta.SetStatusCondition(&out, metav1.Condition{
		Type: v1.SpeakerAddressConflict, Status: metav1.ConditionTrue, Reason: "ForeignMachine", Message: abbreviated(texts),
	})
	return out
}

// bound leaves out of a status what the API server would not take.
func bound(status *v1.SpeakerStatus) {
	status.AddressCount = int32(min(len(status.Addresses), math.MaxInt32))
	status.Addresses = status.Addresses[:min(len(status.Addresses), v1.MaxAnnounced)]
	status.Networks = status.Networks[:min(len(status.Networks), v1.MaxNetworks)]
}

// run writes until ctx ends.
func (t *speakerStatus) run(ctx context.Context, lb *v1.Client, name string, log *slog.Logger) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	var last time.Time
	warned := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		t.mu.Lock()
		due := t.dirty && time.Since(last) >= writePeriod
		t.mu.Unlock()
		if !due {
			continue
		}
		last = time.Now()
		if err := t.flush(ctx, lb, name); err != nil && ctx.Err() == nil && !warned {
			warned = true
			log.Warn("cannot write the Speaker object; retrying", "speaker", name, "err", err)
		} else if err == nil {
			warned = false
		}
	}
}

// flush writes what is to be written.
func (t *speakerStatus) flush(ctx context.Context, lb *v1.Client, name string) error {
	t.writing.Lock()
	defer t.writing.Unlock()
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	t.mu.Lock()
	want := t.want
	dirty := t.dirty
	t.dirty = false
	t.mu.Unlock()
	if !dirty {
		return nil
	}
	err := t.put(ctx, lb, name, want)
	if err != nil {
		t.mu.Lock()
		t.dirty = true
		t.mu.Unlock()
	}
	return err
}

func (t *speakerStatus) put(ctx context.Context, lb *v1.Client, name string, want v1.SpeakerStatus) error {
	for range 3 {
		have, err := lb.Speakers.Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			have, err = lb.Speakers.Create(ctx, &v1.Speaker{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		}
		if err != nil {
			return err
		}
		have.Status = want
		if _, err = lb.Speakers.UpdateStatus(ctx, have, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
			return err
		}
	}
	return errors.New("others write it at the same time")
}

func readLists(m *corev1.ConfigMap) (l quorum.Lists, err error) {
	if err := json.Unmarshal([]byte(m.Data[VotersEntry]), &l); err != nil {
		return quorum.Lists{}, fmt.Errorf("ConfigMap %s/%s, entry %s: %w", Namespace, VotersName, VotersEntry, err)
	}
	return l, nil
}

// getLists reads the lists from where they are written, not out of a cache. There are
// none if the Version is 0.
func getLists(ctx context.Context, client kubernetes.Interface) (quorum.Lists, error) {
	m, err := client.CoreV1().ConfigMaps(Namespace).Get(ctx, VotersName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return quorum.Lists{}, nil
	}
	if err != nil {
		return quorum.Lists{}, err
	}
	return readLists(m)
}
