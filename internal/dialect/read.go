// Package dialect parses annotations of Services, each in one file. It is pure.
// Errors contain the wrong value and the values allowed.
package dialect

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Annotation is a line of a dialect's table.
type Annotation struct {
	// Key is its name. One that ends with * stands for all that begin so.
	Key string
	// Values is what it may be, for people.
	Values string
	// Sets are the fields that it sets. Without one it has no meaning here, and None is why.
	Sets []Field
	None string
	// Later is what happens instead of what it asks for, if this version does not act on it.
	Later string
	// Behaviour is its number in docs/behaviour.md, if it is there.
	Behaviour string

	read func(r *reader, value string) error
}

// Dialect is the annotations of one cloud.
type Dialect struct {
	Name string
	// Source is where they are documented.
	Source string
	// Prefixes are the beginnings of keys that belong to it: others are unknown.
	Prefixes    []string
	Annotations []Annotation
}

// dialects are all dialects. Where several annotations set one field, the first in
// this order counts.
var dialects = []Dialect{
	fairleadDialect(), metallbDialect(), kubevipDialect(), awsDialect(), azureDialect(), gcpDialect(), alibabaDialect(),
	tencentDialect(), openstackDialect(), ibmDialect(), baiduDialect(),
}

// entry is where an annotation is in the tables.
type entry struct {
	order   int
	dialect *Dialect
	*Annotation
}

// index has all annotations by their keys, and wildcards the keys that end with *.
var index, wildcards = makeIndex()

func makeIndex() (map[string]entry, []entry) {
	index, order := map[string]entry{}, 0
	var wildcards []entry
	for i := range dialects {
		d := &dialects[i]
		for j := range d.Annotations {
			a := &d.Annotations[j]
			order++
			e := entry{order, d, a}
			if prefix, is := strings.CutSuffix(a.Key, "*"); is {
				e.Annotation = new(*a)
				e.Key = prefix
				wildcards = append(wildcards, e)
				continue
			}
			index[a.Key] = e
		}
	}
	return index, wildcards
}

// beta begins the annotations of most clouds.
const beta = "service.beta.kubernetes.io/"

// lookUp returns the entry of a key. The AWS Load Balancer Controller takes its keys with service.kubernetes.io/ too.
func lookUp(key string) (entry, bool) {
	if rest, is := strings.CutPrefix(key, "service.kubernetes.io/"); is &&
		(strings.HasPrefix(rest, "aws-load-balancer-") || rest == "load-balancer-source-ranges") {
		key = beta + rest
	}
	if e, ok := index[key]; ok {
		return e, true
	}
	for _, e := range wildcards {
		if strings.HasPrefix(key, e.Key) {
			return e, true
		}
	}
	return entry{}, false
}

// reader collects what the annotations of one Service say.
type reader struct {
	service *Service
	key     string // of the annotation that is read
	Reading
	// raw is what listeners are made of.
	raw       rawListeners
	suggested int // names for unknown annotations
	sticky    rawSticky
	aclOff    bool // of Alibaba's access control lists
	// parameters has the path of each valid listener parameter of Tencent. The value reports whether it is set to something.
	parameters map[string]bool
}

// Read returns what a Service asks of its load balancer. It always returns a Spec that
// is whole: what cannot be understood is a Finding, and counts as not said.
func Read(s Service) *Reading { return read(s, true) }

// read is Read, which may leave out what is unknown.
func read(s Service, all bool) *Reading {
	r := &reader{service: &s, Reading: Reading{Origins: map[Field]Origin{}}}
	type item struct {
		entry
		key, value string
	}
	var items []item
	for _, key := range slices.Sorted(maps.Keys(s.Annotations)) {
		value := s.Annotations[key]
		if e, ok := lookUp(key); ok {
			items = append(items, item{e, key, value})
		} else if !r.almostInternal(key, value) && all {
			if d := ownerOf(key); d != nil {
				r.found(Unknown, key, value, fmt.Sprintf("%s is no annotation of %s%s", key, d.Name, r.suggestion(key)))
			} else if meant := r.misplaced(key); meant != "" {
				r.found(Unknown, key, value, fmt.Sprintf("%s is unknown and has no effect; is %s meant?", key, meant))
			}
		}
	}
	slices.SortFunc(items, func(a, b item) int { return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(a.key, b.key)) })
	for _, i := range items {
		r.readOne(i.key, i.value, i.Annotation)
	}
	r.addressesOf(&s)
	r.finish()
	slices.SortStableFunc(r.Findings, func(a, b Finding) int { return cmp.Compare(a.Annotation, b.Annotation) })
	return &r.Reading
}

// readOne reads one annotation.
func (r *reader) readOne(key, value string, a *Annotation) {
	value = strings.TrimSpace(value)
	if a.None != "" {
		r.found(Meaningless, key, value, "accepted; has no meaning here because "+a.None)
		return
	}
	if value == "" { // the default, also where a cloud's controller fails (behaviour 131)
		r.found(Applied, key, value, "empty: the default")
		return
	}
	r.key = key
	before := len(r.Findings)
	if err := a.read(r, value); err != nil {
		err = fmt.Errorf("annotation %s: %w", key, err)
		_, has := r.Origins[FieldAddresses]
		if r.AddressErr == nil && (!has && slices.Contains(a.Sets, FieldAddresses) || slices.Contains(a.Sets, FieldInternal)) {
			r.AddressErr = err
		}
		r.found(Invalid, key, shorten(value), err.Error())
		return
	}
	if len(r.Findings) == before {
		r.found(Applied, key, value, "as by default")
	}
}

func (r *reader) found(s State, key, value, text string) {
	r.Findings = append(r.Findings, Finding{State: s, Annotation: key, Value: shorten(value), Text: text})
}

// set sets a field by the annotation at hand, unless another one has.
func (r *reader) set(f Field, text string, apply func(*Spec)) {
	if o, has := r.Origins[f]; has {
		if o.Value != text {
			r.found(Overridden, r.key, text, fmt.Sprintf("has no effect: %s is %s by %s", f, shorten(o.Value), o.From))
		}
		return
	}
	r.Origins[f] = Origin{r.key, text}
	if apply != nil {
		apply(&r.Spec)
	}
	r.Findings = append(r.Findings, Finding{Applied, r.key, text, f, string(f) + " " + shorten(text)})
}

// same records that the annotation at hand asks for what is the case without it.
func (r *reader) same(f Field, text string) {
	r.found(Applied, r.key, text, fmt.Sprintf("%s %s, as by default", f, shorten(text)))
}

// addressesOf takes spec.loadBalancerIP into account.
func (r *reader) addressesOf(s *Service) {
	ip := strings.TrimSpace(s.LoadBalancerIP)
	if ip == "" {
		return
	}
	asked, err := parseAddresses(ip)
	from, annotated := r.Origins[FieldAddresses]
	switch {
	case err != nil:
		err = fmt.Errorf("spec.loadBalancerIP: %w", err)
	case len(asked) != 1:
		err = fmt.Errorf("spec.loadBalancerIP: %q is not one address; for one of each family use the annotation %s", shorten(ip), LBAddresses)
	case r.AddressErr != nil:
	case !annotated:
		r.Spec.Addresses = asked
		r.Origins[FieldAddresses] = Origin{"spec.loadBalancerIP", asked[0].String()}
	case !slices.Contains(r.Spec.Addresses, asked[0]):
		err = fmt.Errorf("spec.loadBalancerIP is %s and annotation %s %q: remove one of them", asked[0], from.From, shorten(from.Value))
	}
	if err != nil && r.AddressErr == nil {
		r.AddressErr = err
		r.found(Invalid, "", shorten(ip), err.Error())
	}
}

// ownerOf returns the dialect that a key belongs to by its prefix, nil if it is of none.
func ownerOf(key string) *Dialect {
	for i := range dialects {
		for _, p := range dialects[i].Prefixes {
			if strings.HasPrefix(key, p) {
				return &dialects[i]
			}
		}
	}
	return nil
}

// maxSuggestions bounds the work for a Service with thousands of unknown annotations.
const maxSuggestions = 5

// suggestion returns the nearest known key, as the end of a sentence.
func (r *reader) suggestion(key string) string {
	const worst = 6 // of a long name; more than that is another word
	if len(key) > 200 || r.suggested == maxSuggestions {
		return ""
	}
	r.suggested++
	if meant := Nearest(key, slices.Sorted(maps.Keys(index)), worst); meant != "" {
		return "; is " + meant + " meant?"
	}
	return ""
}

// endings has the known keys by what follows their domain, and endingNames what that is.
var endings, endingNames = makeEndings()

func makeEndings() (map[string]string, []string) {
	out := map[string]string{}
	for _, key := range slices.Sorted(maps.Keys(index)) {
		if name := key[strings.LastIndexByte(key, '/')+1:]; out[name] == "" && namesBalancer(name) {
			out[name] = key
		}
	}
	return out, slices.Sorted(maps.Keys(out))
}

// namesBalancer reports whether a name is likely one about a load balancer.
func namesBalancer(name string) bool {
	name = strings.ToLower(name)
	return strings.Contains(name, "loadbalancer") || strings.Contains(name, "load-balancer")
}

// misplaced returns the annotation that is meant by a key of another domain, or of none, as aws-loadbalancer-ssl-cert.
func (r *reader) misplaced(key string) string {
	const worst = 3
	name := strings.ToLower(key[strings.LastIndexByte(key, '/')+1:])
	if len(key) > 200 || r.suggested >= maxSuggestions || !namesBalancer(name) {
		return ""
	}
	r.suggested++
	return endings[Nearest(name, endingNames, worst)]
}

// Nearest returns the first of the names that the fewest letters make of word, "" if it takes more than worst.
func Nearest(word string, names []string, worst int) string {
	nearest, least := "", worst+1
	for _, name := range names {
		if d := distance(word, name, least); d < least {
			nearest, least = name, d
		}
	}
	return nearest
}

// OwnKeys returns the annotations of Services that are fairlead's own, sorted.
func OwnKeys() []string {
	var out []string
	for key := range index {
		if IsOwn(key) {
			out = append(out, key)
		}
	}
	slices.Sort(out)
	return out
}

// IsOwn reports whether an annotation is one for load balancers of fairlead's own, known or not.
func IsOwn(key string) bool { return strings.HasPrefix(key, lbPrefix) }

// ofFronts are the fields that a front of Ingresses sets itself: its Ingresses have the protocols, certificates and paths.
var ofFronts = []Field{
	FieldProtocol, FieldBackend, FieldCertificates, FieldTLSPorts, FieldACMEHosts, FieldACMEChallenge, FieldHealthEnabled, FieldRedirects,
	FieldCompress,
}

// OfFront returns the annotations of an Ingress that the Service of its front takes over, and the keys of those about load balancers
// that it does not, sorted. A mistyped one is taken over: as at any Service it gets a Warning, and no address if it is about that.
func OfFront(all map[string]string) (taken map[string]string, refused []string) {
	taken = map[string]string{}
	r := &reader{service: &Service{}, Reading: Reading{Origins: map[Field]Origin{}}}
	for _, key := range slices.Sorted(maps.Keys(all)) {
		e, known := lookUp(key)
		switch {
		case known && slices.ContainsFunc(e.Sets, func(f Field) bool { return slices.Contains(ofFronts, f) }):
			if key != LBCompress { // the rules of the Ingress have it
				refused = append(refused, key)
			}
		case known && e.None == "", !known && (ownerOf(key) != nil || r.almostInternal(key, all[key])):
			taken[key] = all[key]
		}
	}
	return taken, refused
}

// distance returns the Levenshtein distance of two strings, or limit if it is not less.
func distance(a, b string, limit int) int {
	if d := len(a) - len(b); d >= limit || -d >= limit {
		return limit
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal, least := row[0], limit
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
			least = min(least, row[j+1])
		}
		if least >= limit {
			return limit
		}
	}
	return min(row[len(b)], limit)
}

// ParseLoadBalancer reads what the annotations of a Service and its spec.loadBalancerIP say
// about its address. With an error the rest of the result is what could be read.
func ParseLoadBalancer(annotations map[string]string, loadBalancerIP string) (LoadBalancer, error) {
	r := read(Service{Annotations: annotations, LoadBalancerIP: loadBalancerIP}, false)
	return r.Spec.LoadBalancer, r.AddressErr
}

// parseAddresses reads one address, or one of each family with a comma between.
func parseAddresses(list string) ([]netip.Addr, error) {
	var out []netip.Addr
	for item := range strings.SplitSeq(list, ",") {
		a, err := netip.ParseAddr(strings.TrimSpace(item))
		switch {
		case err != nil || a.Zone() != "":
			return nil, fmt.Errorf("%q is not an IP address, or one of each family with a comma between", shorten(list))
		case a.Is4In6():
			return nil, fmt.Errorf("%s is an IPv4 address; write it as %s", a, a.Unmap())
		case len(out) == 2 || len(out) == 1 && out[0].Is4() == a.Is4():
			return nil, errors.New("more than one address of a family")
		}
		out = append(out, a)
	}
	return out, nil
}

// shorten returns as much of a wrong value as an error repeats.
func shorten(v string) string {
	if len(v) > maxShown {
		return v[:maxShown] + "..."
	}
	return v
}
