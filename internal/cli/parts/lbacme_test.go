package parts

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/lb/acme"
	lbcontroller "github.com/fairlead/fairlead/internal/lb/controller"
)

// The flags of an authority of ACME are read, or rejected with the flag's name.
func TestACMEFlags(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return "--lb-acme-eab-key-file=" + path
	}
	const zone = "--lb-acme-dns-zone=shop.example=127.0.0.1:5353"
	const tsig = "key \"fairlead\" {\n\talgorithm hmac-sha256;\n\tsecret \"MDEyMzQ1Njc4OWFiY2RlZj4/\";\n};\n"
	zoneKey := func(name, text string, mode os.FileMode) string {
		return strings.Replace(file(name, text, mode), "eab", "dns", 1)
	}
	const id = "--lb-acme-eab-key-id=kid-1"
	key := []byte("0123456789abcdef>?")
	directory := []string{"--lb-acme-directory=https://acme.example/dir", "--lb-acme-domain=shop.example"}
	for _, c := range []struct {
		args  []string
		fails string
		want  acme.Limits
	}{
		{nil, "", acme.DefaultLimits()},
		{[]string{"--lb-acme-limits=orders=7,failures=0"}, "", acme.Limits{Orders: 7, DomainOrders: 45, HostFailures: 4}},
		{[]string{"--lb-acme-limits=order=7"}, "--lb-acme-limits: \"order=7\"", acme.Limits{}},
		{[]string{"--lb-acme-limits=orders=-7"}, "--lb-acme-limits: \"orders=-7\"", acme.Limits{}},
		{[]string{"--lb-acme-limits=orders"}, "--lb-acme-limits: \"orders\"", acme.Limits{}},
		{[]string{"--lb-acme-domain=Bad_Name"}, "--lb-acme-domain", acme.Limits{}},
		{[]string{id, file("url", "MDEyMzQ1Njc4OWFiY2RlZj4_\n", 0o600)}, "", acme.DefaultLimits()},
		{[]string{id, file("std", "MDEyMzQ1Njc4OWFiY2RlZj4/", 0o400)}, "", acme.DefaultLimits()},
		{[]string{id, file("open", "MDEyMzQ1Njc4OWFiY2RlZj4_", 0o640)}, "others may read it (mode 0640)", acme.Limits{}},
		{[]string{id, file("short", "MDEy", 0o600)}, "has no key", acme.Limits{}},
		{[]string{id}, "need each other", acme.Limits{}},
		{[]string{zone}, "--lb-acme-dns-zone and --lb-acme-dns-key-file need each other", acme.Limits{}},
		{[]string{zone, zoneKey("tsig", tsig, 0o600)}, "", acme.DefaultLimits()},
		{[]string{zone, zoneKey("tsig-open", tsig, 0o604)}, "others may read it (mode 0604)", acme.Limits{}},
		{[]string{zone, zoneKey("no-tsig", "MDEyMzQ1", 0o600)}, "it is not key", acme.Limits{}},
		{[]string{"--lb-acme-dns-zone=shop.example", zoneKey("tsig2", tsig, 0o600)}, "is not HOST or HOST:PORT", acme.Limits{}},
	} {
		f := &acmeFlags{}
		flags := pflag.NewFlagSet("x", pflag.ContinueOnError)
		f.add(flags)
		if err := flags.Parse(append(directory, c.args...)); err != nil {
			t.Fatal(err)
		}
		var o *lbcontroller.ACME
		err := f.check()
		if err == nil {
			o, err = f.options()
		}
		if c.fails != "" {
			if err == nil || !strings.Contains(err.Error(), c.fails) {
				t.Errorf("%v: %v; want %s", c.args, err, c.fails)
			}
			continue
		}
		if err != nil {
			t.Errorf("%v: %v", c.args, err)
		} else if o.Limits != c.want || slices.Contains(c.args, id) && (o.Binding.KeyID != "kid-1" || !bytes.Equal(o.Binding.Key, key)) {
			t.Errorf("%v: %+v, bound to %+v", c.args, o.Limits, o.Binding)
		}
	}
}
