package lbview

import (
	"bytes"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/cli/base"
)

// The text tells whose configuration it is. What is refused is named, and then nothing is printed.
func TestConvert(t *testing.T) {
	const ofMetalLB = `
{apiVersion: metallb.io/v1beta1, kind: IPAddressPool, metadata: {name: p}, spec: {addresses: [192.0.2.0/24]}}
---
{apiVersion: metallb.io/v1beta1, kind: L2Advertisement, metadata: {name: l}}
`
	const ofKubeVIP = "{apiVersion: v1, kind: ConfigMap, metadata: {name: kubevip}, data: {cidr-global: 192.0.2.0/24, KEY: desc}}"
	for _, c := range []struct{ in, out, notes, err string }{
		{ofMetalLB, "# For nodes with --lb-announce=arp\napiVersion: fairlead.dev/v1\nkind: IPAddressPool\nmetadata:\n  name: p\n", "", ""},
		{strings.Replace(ofKubeVIP, "KEY", "search-order", 1),
			"apiVersion: fairlead.dev/v1\nkind: IPAddressPool\nmetadata:\n  name: kube-vip-global\n",
			"note: data[search-order]: it has no effect", ""},
		{strings.Replace(ofKubeVIP, "KEY", "order", 1), "", "data[order]: want cidr-", "cannot convert -: 1 fields cannot be kept"},
		{strings.Replace(ofMetalLB, "addresses", "adresses", 1), "", "IPAddressPool/p: ", "fields cannot be kept"},
		{"{}", "", "", "want objects of metallb.io"},
	} {
		var out, notes bytes.Buffer
		g := &base.Global{Streams: base.Streams{In: strings.NewReader(c.in), Out: &out, Err: &notes}}
		err := convert(g, "-")
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %v; want %s", c.in, err, c.err)
		}
		if !strings.HasPrefix(out.String(), c.out) || c.out == "" && out.Len() > 0 || !strings.Contains(notes.String(), c.notes) {
			t.Errorf("%s: %s\n%s\nwant %s and %s", c.in, &out, &notes, c.out, c.notes)
		}
	}
}
