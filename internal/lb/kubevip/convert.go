package kubevip

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/yaml"
	kjson "sigs.k8s.io/json"

	"github.com/fairlead/fairlead/internal/lb/pool"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// Result is a ConfigMap in fairlead's terms.
type Result struct {
	Pools []*v1.IPAddressPool
	// Notes list what the reader has to do or know.
	Notes []string
}

// Refusals are the keys that cannot be kept, each with the reason.
type Refusals []string

// Error returns them in one line.
func (r Refusals) Error() string { return strings.Join(r, "; ") }

// The keys of a ConfigMap. The first four end with a namespace, or with global.
const (
	keyCIDR      = "cidr"
	keyRange     = "range"
	keyShare     = "allow-share"
	keyInterface = "interface"
	keyOrder     = "search-order"
	keySkipEnds  = "skip-end-ips-in-cidr"
)

const (
	// global ends the keys for all namespaces without a key.
	global = "global"
	// poolPrefix begins the names of pools.
	poolPrefix = "kube-vip-"
	// byDHCP is the pool of Services whose address kube-vip asks a DHCP server for.
	byDHCP = "0.0.0.0/32"
)

// Is reports whether a text begins with a ConfigMap.
func Is(text []byte) bool {
	var head metav1.TypeMeta
	err := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096).Decode(&head)
	return err == nil && head.APIVersion == "v1" && head.Kind == "ConfigMap"
}

// taken are addresses of a key.
type taken struct {
	pool.Range
	key string
}

// converter converts one ConfigMap.
type converter struct {
	// of has the values by the first part of the key and by namespace.
	of       map[string]map[string]string
	skipEnds bool
	// taken are the addresses of pools.
	taken   []taken
	refused Refusals
	out     Result
}

func (c *converter) refuse(key, format string, args ...any) {
	c.refused = append(c.refused, fmt.Sprintf("data[%s]: ", key)+fmt.Sprintf(format, args...))
}

func (c *converter) note(key, format string, args ...any) {
	c.out.Notes = append(c.out.Notes, fmt.Sprintf("data[%s]: ", key)+fmt.Sprintf(format, args...))
}

// Convert reads a ConfigMap as YAML or JSON and returns what it means for fairlead. If keys cannot be kept, the error is
// Refusals.
func Convert(text []byte) (*Result, error) {
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096)
	var raw, more json.RawMessage
	if err := decoder.Decode(&raw); err != nil {
		return nil, err
	}
	if err := decoder.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, errors.New("there is more than one ConfigMap")
	}
	var m corev1.ConfigMap
	wrong, err := kjson.UnmarshalStrict(raw, &m)
	switch {
	case err != nil:
		return nil, err
	case len(wrong) > 0:
		return nil, errors.Join(wrong...)
	case len(m.Data) == 0:
		return nil, errors.New("the ConfigMap has no data")
	}
	c := &converter{of: map[string]map[string]string{}}
	c.sort(m.Data)
	c.notes()
	c.pools()
	if len(c.refused) > 0 {
		return nil, c.refused
	}
	return &c.out, nil
}

// sort puts the values where they belong.
func (c *converter) sort(data map[string]string) {
	for _, key := range slices.Sorted(maps.Keys(data)) {
		value := strings.TrimSpace(data[key])
		kind, namespace, known := kindOf(key)
		switch {
		case key == keyOrder && value == "desc":
			c.note(key, "it has no effect: fairlead chooses the order of addresses")
		case key == keyOrder:
		case key == keySkipEnds:
			c.skipEnds = value == "true"
		case !known:
			c.refuse(key, "want %s-, %s-, %s- or %s- with a namespace or %s behind it, %s or %s", keyCIDR, keyRange, keyShare, keyInterface, global,
				keyOrder, keySkipEnds)
		default:
			if c.of[kind] == nil {
				c.of[kind] = map[string]string{}
			}
			c.of[kind][namespace] = value
		}
	}
}

func kindOf(key string) (kind, namespace string, known bool) {
	for _, kind := range []string{keyCIDR, keyRange, keyShare, keyInterface} {
		if ns, ok := strings.CutPrefix(key, kind+"-"); ok {
			return kind, ns, len(validation.IsDNS1123Label(ns)) == 0
		}
	}
	return "", "", false
}

// notes notes keys that kube-vip does not come to, and refuses sharing.
func (c *converter) notes() {
	_, cidrs := c.of[keyCIDR][global]
	for _, namespace := range sorted(c.of[keyRange]) {
		if _, own := c.of[keyCIDR][namespace]; own {
			c.note(keyRange+"-"+namespace, "it is left out: kube-vip takes %s-%s", keyCIDR, namespace)
		} else if cidrs {
			c.note(keyRange+"-"+namespace, "it is left out: kube-vip takes %s-%s", keyCIDR, global)
		}
	}
	for _, namespace := range sorted(c.of[keyShare]) {
		if shared, err := strconv.ParseBool(c.of[keyShare][namespace]); err == nil && shared {
			c.refuse(keyShare+"-"+namespace, "fairlead shares an address only between Services that ask for it: give the ones that share one the "+
				"annotation fairlead.dev/lb-sharing-key with the same value, and then take this key away")
		}
	}
}

func sorted(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }

// keyFor returns the key whose addresses the Services of a namespace get.
func (c *converter) keyFor(namespace string) (key, value string) {
	for _, kind := range []string{keyCIDR, keyRange} {
		for _, of := range []string{namespace, global} {
			if value, ok := c.of[kind][of]; ok {
				return kind + "-" + of, value
			}
		}
	}
	return "", ""
}

// pools makes a pool for each key that some namespace gets addresses of.
func (c *converter) pools() {
	var apart []string // namespaces with addresses of their own
	for _, namespace := range sorted(merged(c.of[keyCIDR], c.of[keyRange])) {
		key, _ := c.keyFor(namespace)
		if namespace != global && strings.HasSuffix(key, "-"+namespace) {
			apart = append(apart, namespace)
		}
	}
	common, _ := c.keyFor(global)
	for _, namespace := range sorted(c.of[keyInterface]) {
		key, _ := c.keyFor(namespace)
		switch {
		case slices.Contains(apart, namespace) || namespace == global:
		case key == "":
			c.note(keyInterface+"-"+namespace, "it is left out: the namespace has no addresses")
		case c.of[keyInterface][namespace] != c.of[keyInterface][global]:
			c.refuse(keyInterface+"-"+namespace, "the namespace gets addresses of %s, and the interfaces of a pool are the same for all "+
				"of its Services: give the namespace addresses of its own", key)
		}
	}
	for _, namespace := range apart {
		key, value := c.keyFor(namespace)
		c.add(key, value, namespace).Spec.Namespaces = []string{namespace}
	}
	if common != "" {
		p := c.add(common, c.of[keyOf(common)][global], global)
		if len(apart) > 0 {
			p.Spec.NamespaceSelector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
				{Key: corev1.LabelMetadataName, Operator: metav1.LabelSelectorOpNotIn, Values: apart},
			}}
		}
	}
	if len(c.out.Pools) == 0 && len(c.refused) == 0 {
		c.refuse(keyCIDR+"-"+global, "there are no addresses in the ConfigMap")
	}
}

func merged(a, b map[string]string) map[string]string {
	out := maps.Clone(b)
	if out == nil {
		out = map[string]string{}
	}
	maps.Copy(out, a)
	return out
}

func keyOf(key string) string {
	kind, _, _ := kindOf(key)
	return kind
}

// add adds the pool of a key.
func (c *converter) add(key, value, namespace string) *v1.IPAddressPool {
	p := &v1.IPAddressPool{ObjectMeta: metav1.ObjectMeta{Name: poolPrefix + namespace}}
	c.out.Pools = append(c.out.Pools, p)
	if value == byDHCP {
		c.refuse(key, "fairlead does not ask a DHCP server for addresses: give out some that the server does not")
		return p
	}
	cidrs := strings.Contains(value, "/")
	for text := range strings.SplitSeq(value, ",") {
		text = strings.TrimSpace(text)
		item, err := c.rangeOf(text, cidrs)
		var r pool.Range
		if err == nil {
			r, err = pool.Parse(item)
		}
		if err != nil {
			c.refuse(key, "%s", err)
			continue
		}
		c.refuseOverlap(key, text, r)
		c.taken = append(c.taken, taken{r, key})
		if !slices.Contains(p.Spec.Addresses, item) {
			p.Spec.Addresses = append(p.Spec.Addresses, item)
		}
	}
	name, has := c.of[keyInterface][namespace]
	if !has {
		name = c.of[keyInterface][global]
	}
	if name != "" {
		p.Spec.Interfaces = []string{name}
	}
	return p
}

// rangeOf returns an item of a value as fairlead writes it. kube-vip takes a CIDR with bits behind its prefix for the network.
func (c *converter) rangeOf(text string, cidr bool) (string, error) {
	if !cidr {
		if !strings.Contains(text, "-") {
			return "", fmt.Errorf("%q: want first-last like 192.0.2.10-192.0.2.20", text)
		}
		return strings.ReplaceAll(text, " ", ""), nil
	}
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return "", fmt.Errorf("%q: want a CIDR like 192.0.2.0/24", text)
	}
	p = p.Masked()
	const pair = 31 // RFC 3021: both are addresses of hosts
	if !c.skipEnds || !p.Addr().Is4() || p.Bits() >= pair {
		return p.String(), nil
	}
	r, err := pool.Parse(p.String())
	if err != nil {
		return "", err
	}
	return r.First.Next().String() + "-" + r.Last.Prev().String(), nil
}

// refuseOverlap refuses addresses that another key has, too: kube-vip may give such a one to two Services.
func (c *converter) refuseOverlap(key, text string, r pool.Range) {
	for _, o := range c.taken {
		if o.key != key && !r.Last.Less(o.First) && !o.Last.Less(r.First) {
			c.refuse(key, "%s has addresses of %s, and an address has one pool", text, o.key)
		}
	}
}
