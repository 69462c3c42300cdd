package corefile

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// plugins returns the names of a block's chain.
func plugins(b Block) string {
	var out []string
	for _, p := range b.Plugins {
		out = append(out, p.PluginName())
	}
	return strings.Join(out, " ")
}

// The files of distributions and clouds are read as they are, and their chains are in CoreDNS's order.
func TestDistributions(t *testing.T) {
	t.Setenv("POD_IP", "192.0.2.7")
	const common = "reload ready health prometheus errors loadbalance cache kubernetes loop forward"
	for file, want := range map[string][]string{
		"kubeadm": {"[{. 53 dns}] " + common},
		"rke2":    {"[{. 53 dns}] " + common},
		"eks":     {"[{. 53 dns}] " + common},
		"k3s":     {"[{. 53 dns}] reload ready health prometheus errors loadbalance cache hosts kubernetes loop forward"},
		"aks": {
			"[{. 53 dns}] reload ready health prometheus errors loadbalance rewrite cache template template hosts kubernetes loop forward",
			"[{puglife.local. 53 dns}] errors cache forward",
		},
		"gke": {"[{. 53 dns}] " + common, "[{acme.local. 53 dns}] errors cache loop forward"},
		"openshift": {
			"[{example.com. 5353 dns} {foo.com. 5353 dns}] bufsize prometheus errors log cache forward",
			"[{. 5353 dns}] reload bufsize ready health prometheus errors log cache kubernetes forward",
			"[{hostname.bind. 5353 dns}] chaos",
		},
		"nodelocaldns": {
			"[{cluster.local. 53 dns}] reload health prometheus errors cache loop forward",
			"[{in-addr.arpa. 53 dns}] reload prometheus errors cache loop forward",
			"[{ip6.arpa. 53 dns}] reload prometheus errors cache loop forward",
			"[{. 53 dns}] reload prometheus errors cache loop forward",
		},
		"cce": {"[{. 5353 dns}] reload ready health prometheus errors loadbalance cache kubernetes forward"},
	} {
		text, err := os.ReadFile(filepath.Join("testdata", file+".Corefile"))
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS("testdata")); err != nil {
			t.Fatal(err)
		}
		p, err := load(t, dir, strings.ReplaceAll(string(text), "/etc/resolv.conf", resolvConf(t, dir)))
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		var got []string
		for _, b := range p.Blocks {
			got = append(got, fmt.Sprint(b.Zones)+" "+plugins(b))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s:\n%s\nwant\n%s", file, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		if len(p.Notes) > 0 {
			t.Errorf("%s: settings without effect: %v", file, p.Notes)
		}
	}
}

func resolvConf(t *testing.T, dir string) string {
	t.Helper()
	file := filepath.Join(dir, "resolv.conf")
	if err := os.WriteFile(file, []byte("search example.org\nnameserver 192.0.2.1\nnameserver 2001:db8::1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// load reads a file with text in a directory.
func load(t *testing.T, dir, text string) (*Plan, error) {
	t.Helper()
	file := filepath.Join(dir, "Corefile")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return Load(file)
}

func TestValues(t *testing.T) {
	dir := t.TempDir()
	p, err := load(t, dir, `.:53 10.0.0.0/23 {
    kubernetes cluster.local 2001:db8::/32 {
        pods verified
        namespaces a b
        fallthrough ip6.arpa
    }
    forward . tls://192.0.2.1%a.example tls://[2001:db8::1]:8853 {
        tls_servername dns.example
        except example.com
        health_check 2s no_rec domain x.example
        max_fails 3
        expire 1m
    }
    cache 30 example.net {
        success 100 60 1
        servfail 0s
        serve_stale 2h verify 100ms
        prefetch 3 2m 20%
    }
    bind 127.0.0.1
    bind ::1
}`)
	if err != nil {
		t.Fatal(err)
	}
	b := p.Blocks[0]
	if got := fmt.Sprint(b.zoneNames(), b.Bind); got != "[. 0.0.10.in-addr.arpa. 1.0.10.in-addr.arpa.] [127.0.0.1 ::1]" {
		t.Errorf("zones and addresses: %s", got)
	}
	k := Find[*Kubernetes](b.Plugins)[0]
	if got := fmt.Sprint(k.Zones, k.Reverse, k.Pods, k.TTL, k.Namespaces, k.Fall); got !=
		"[cluster.local.] [8.b.d.0.1.0.0.2.ip6.arpa.]verified5 [a b] {[ip6.arpa.]}" {
		t.Errorf("kubernetes: %s", got)
	}
	f := Find[*Forward](b.Plugins)[0]
	if got := fmt.Sprint(f.To, f.Except, f.HealthEvery, f.HealthDomain, f.HealthNoRecursion, f.MaxFails, f.Expire, f.TLSServerName); got !=
		"[{192.0.2.1:853 true a.example} {[2001:db8::1]:8853 true }] [example.com.] 2sx.example.true 3 1m0sdns.example" {
		t.Errorf("forward: %s", got)
	}
	c := Find[*Cache](b.Plugins)[0]
	want := Cache{
		Zones: []string{"example.net."}, Success: CacheLimits{Capacity: 100, MinTTL: time.Second, MaxTTL: time.Minute},
		Denial:       CacheLimits{Capacity: 10000, MinTTL: 5 * time.Second, MaxTTL: 30 * time.Second},
		PrefetchHits: 3, PrefetchWithin: 2 * time.Minute, PrefetchPercent: 20, StaleFor: 2 * time.Hour, StaleWait: 100 * time.Millisecond,
		StaleVerify: true,
	}
	if got := fmt.Sprint(*c); got != fmt.Sprint(want) {
		t.Errorf("cache: %s\nwant %v", got, want)
	}
}

// Quotes, comments, variables, snippets and imports are read as Caddy reads them.
func TestSyntax(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("ZONE", "a.example")
	for name, text := range map[string]string{"part.inc": "log\n", "more.inc": "whoami # a comment\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for text, want := range map[string]string{
		".\nwhoami":                                      "[{. 53 dns}] whoami",
		"{$ZONE}:1053, b.example {\nwhoami\n}":           "[{a.example. 1053 dns} {b.example. 53 dns}] whoami",
		"{%ZONE%} {$NONE}\n{\n  whoami\n}":               "[{a.example. 53 dns}] whoami",
		"\ufeff. {\r\n\twhoami\r\n}\r\n":                 "[{. 53 dns}] whoami",
		"(s) {\n log\n}\n. {\n import s\n any\n}":        "[{. 53 dns}] log any",
		". {\n import *.inc\n}":                          "[{. 53 dns}] log whoami",
		". {\n import none/*.inc\n any\n}":               "[{. 53 dns}] any",
		". {\n log . \"{name} # \\\"x\\\" {common}\"\n}": "[{. 53 dns}] log",
		"tls://. {\n tls c k\n any\n}":                   "[{. 853 tls}] any",
	} {
		p, err := load(t, dir, text)
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		if got := fmt.Sprint(p.Blocks[0].Zones) + " " + plugins(p.Blocks[0]); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
		l := Find[*Log](p.Blocks[0].Plugins)
		if len(l) > 0 && strings.Contains(text, "name") && !strings.HasPrefix(l[0].Format, `{name} # "x" {remote}`) {
			t.Errorf("the format of log is %q", l[0].Format)
		}
	}
}

// What cannot be done is refused with file, line and what to do.
func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "loop.inc"), []byte("import loop.inc"), 0o600); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{
		"":                                      "has no server block",
		",":                                     "Corefile:1: a server block needs a zone",
		"{$NOSUCHZONES}":                        "a server block needs a zone",
		". {\n any\n}\n,":                       "Corefile:4: a server block needs a zone",
		". {":                                   "Corefile:1: the brace that opens here is never closed",
		"{\n}":                                  "Corefile:1: a server block needs a zone",
		". {\n log \"x\n}":                      "Corefile:2: a quote that begins here is never closed",
		". {\n nosuch\n}":                       "Corefile:2: unknown plugin \"nosuch\"",
		". {\n\n etcd\n}":                       "Corefile:3: plugin etcd is not supported: keep CoreDNS for this zone",
		". {\n cache\n cache\n}":                "Corefile:3: plugin cache is there twice in this server block, first at",
		". {\n}\n. {\n}":                        "Corefile:3: zone . on port 53 is already served by the block at",
		". {\n bind 127.0.0.1\n}\n. {\n}":       "already served",
		"quic://. {\n}":                         "Corefile:1: quic://.: the transport quic is not supported; want dns:// or tls://",
		"tls://. {\n}":                          "the block needs a line tls CERT KEY",
		".: {\n}":                               "there is no port behind the colon",
		"a..b {\n}":                             "neither a domain name nor a range",
		". {\n import nosuch\n}":                "Corefile:2: cannot import \"nosuch\": there is no such snippet above, and no such file",
		". {\n import a b\n}":                   "import takes one argument",
		". {\n import loop.inc\n}":              "does \"loop.inc\" import itself?",
		"(s) {\n}\n(s) {\n}":                    "Corefile:3: there is already a snippet \"s\"",
		". {\n forward . nosuch.example\n}":     "neither an IP address nor a file that can be read",
		". {\n forward . 192.0.2.1 {\n x\n}\n}": "Corefile:3: forward: unknown property \"x\"; want one of doh",
		". {\n forward . https://192.0.2.1\n}":  "the transport https:// of https://192.0.2.1 is not supported",
		". {\n kubernetes {\n endpoint http://x\n}\n}":      "Corefile:3: kubernetes: endpoint is not supported: name the API server",
		". {\n kubernetes in-addr.arpa\n}":                  "a zone that is not a reverse zone is needed",
		". {\n kubernetes {\n ttl 4000\n}\n}":               "\"4000\" is not a number from 0 to 3600",
		". {\n cache 0\n}":                                  "\"0\" is not a number from 1",
		". {\n cache {\n prefetch 1 1m \"\"\n}\n}":          "does not end with %",
		". {\n cache {\n servfail 6m\n}\n}":                 "want at most 5m0s",
		". {\n health 8080\n}":                              "\"8080\" is not of the form [ADDRESS]:PORT",
		". {\n reload 1s\n}":                                "the interval is 1s; want 2s or more",
		". {\n template IN A {\n answer \"{{ .Name\"\n}\n}": "template: answer:",
		". {\n rewrite edns0 local set a b\n}":              "\"edns0\" is not supported; want one of class, name, rcode, ttl, type",
		". {\n rewrite name regex ( b\n}":                   "error parsing regexp",
		". {\n acl {\n deny\n}\n}":                          "unknown property \"deny\"; want one of allow, block, filter, drop",
		". {\n acl {\n allow net 10.0.0.0/33\n}\n}":         "\"10.0.0.0/33\" is neither an address nor a range",
		". {\n dns64 64:ff9b::/95\n}":                       "is not an IPv6 range of length",
		". {\n auto\n}":                                     "auto: the property directory is missing",
	} {
		want = strings.Replace(want, "one of doh", "one of", 1)
		_, err := load(t, dir, text)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v\nwant %q", text, err, want)
		}
	}
}

func TestChanged(t *testing.T) {
	dir := t.TempDir()
	p, err := load(t, dir, ". {\n import *.inc\n any\n}")
	if err != nil || p.Changed() {
		t.Fatalf("%v, changed without a change", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "a.inc"), []byte("log"), 0o600); err != nil {
		t.Fatal(err)
	}
	if !p.Changed() {
		t.Error("a new file that a pattern matches is no change")
	}
}

func FuzzLoad(f *testing.F) {
	f.Add(". {\n rewrite name a b\n cache 30 {\n prefetch 1 1m 10%\n}\n}")
	f.Add("(a) {\n import a\n}\nb:53 {\n hosts {\n 10.0.0.1 x\n}\n import a\n}")
	f.Add(". {\n acl {\n allow type A net 10.0.0.0/8\n}\n template IN ANY {\n answer \"{{ .Name }} 60 IN A 10.0.0.1\"\n}\n}")
	f.Add(",")
	f.Add("{$NOSUCHZONES}")
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, text string) {
		file := filepath.Join(dir, "Corefile")
		if strings.Contains(text, "import") && strings.ContainsAny(text, "/*?[") {
			t.Skip("reads files of the machine")
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if p, err := Load(file); err == nil && len(p.Blocks) == 0 {
			t.Error("neither an error nor a server block")
		}
	})
}
