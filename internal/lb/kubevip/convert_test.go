package kubevip

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// A ConfigMap becomes the pools and the notes beside it.
func TestConvert(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, ".out.yaml") {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if !Is(text) {
			t.Errorf("%s is not taken for a ConfigMap", file)
		}
		r, err := Convert(text)
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		got, err := yaml.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		golden := strings.TrimSuffix(file, ".yaml") + ".out.yaml"
		if os.Getenv("UPDATE") != "" {
			if err := os.WriteFile(golden, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil || string(got) != string(want) {
			t.Errorf("%s: %v, got\n%s", file, err, got)
		}
	}
}

// What cannot be kept, and what is wrong, is refused by its key: nothing is left out in silence, and no Service gets an address of others.
func TestRefusals(t *testing.T) {
	for _, c := range []struct{ data, want string }{
		{"", "the ConfigMap has no data"},
		{"search-order: asc", "data[cidr-global]: there are no addresses"},
		{"cidr-global: 192.0.2.0/24, skip-start-ips: '3'", "data[skip-start-ips]: want cidr-, range-"},
		{"cidr-Shop: 192.0.2.0/24", "data[cidr-Shop]: want cidr-"},
		{"cidr-global: 192.0.2.0/240", `data[cidr-global]: "192.0.2.0/240": want a CIDR`},
		{"cidr-global: '192.0.2.0/24,192.0.3.1-192.0.3.9'", `data[cidr-global]: "192.0.3.1-192.0.3.9": want a CIDR`},
		{"range-global: 192.0.2.1", `data[range-global]: "192.0.2.1": want first-last`},
		{"range-global: 192.0.2.9-192.0.2.1", "data[range-global]: \"192.0.2.9-192.0.2.1\": the last address is before the first"},
		{"cidr-global: 0.0.0.0/32", "data[cidr-global]: fairlead does not ask a DHCP server"},
		{"cidr-global: 0.0.0.0/0", "data[cidr-global]: "},
		{"cidr-global: 192.0.2.0/24, allow-share-shop: 'true'", "data[allow-share-shop]: fairlead shares an address only"},
		{"cidr-global: 192.0.2.0/24, interface-shop: eth1", "data[interface-shop]: the namespace gets addresses of cidr-global"},
		{"cidr-global: 192.0.2.0/24, cidr-shop: 192.0.2.128/28", "data[cidr-global]: 192.0.2.0/24 has addresses of cidr-shop"},
	} {
		text := "{apiVersion: v1, kind: ConfigMap, metadata: {name: kubevip}, data: {" + c.data + "}}"
		if r, err := Convert([]byte(text)); err == nil || !strings.Contains(err.Error(), c.want) || r != nil {
			t.Errorf("%s: %v; want %s", c.data, err, c.want)
		}
	}
	for _, text := range []string{"[", "{apiVersion: v1, kind: ConfigMap, dat: {}}", "{apiVersion: v1, kind: ConfigMap, data: {a: 1}}",
		"apiVersion: v1\nkind: ConfigMap\ndata: {search-order: asc, cidr-global: 192.0.2.0/24}\n---\n{}"} {
		if _, err := Convert([]byte(text)); err == nil {
			t.Errorf("%s is accepted", text)
		}
	}
	for _, text := range []string{"", "{apiVersion: v1, kind: List}", "{apiVersion: metallb.io/v1beta1, kind: IPAddressPool}"} {
		if Is([]byte(text)) {
			t.Errorf("%s is taken for a ConfigMap", text)
		}
	}
}
