package backup

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"time"
)

func example(t *testing.T) ([]byte, map[string]string) {
	t.Helper()
	parts := map[string]string{"version": "1\n", "pki/ca.key": strings.Repeat("key", 300), Store: strings.Repeat("objects ", 5000)}
	m := &Manifest{Format: Format, Version: "v1", Layout: 1, Created: time.Now()}
	for _, name := range []string{"version", "pki/ca.key", Store} {
		p, err := PartOf(name, strings.NewReader(parts[name]))
		if err != nil {
			t.Fatal(err)
		}
		m.Parts = append(m.Parts, p)
	}
	var b bytes.Buffer
	err := Write(&b, m, func(name string) (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(parts[name])), nil })
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes(), parts
}

func open(data []byte) (*Archive, error) { return Open(bytes.NewReader(data), int64(len(data))) }

// What was written is read, by tar as well.
func TestRoundTrip(t *testing.T) {
	data, parts := example(t)
	a, err := open(data)
	if err != nil || a.Version != "v1" || len(a.Damaged()) > 0 {
		t.Fatalf("%+v, %v", a, err)
	}
	for i, p := range a.Parts {
		if got, err := io.ReadAll(a.Content(i)); err != nil || string(got) != parts[p.Name] {
			t.Errorf("%s: %v, %d bytes", p.Name, err, len(got))
		}
	}
	var names []string
	for r := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || h.Mode != 0o600 {
			t.Fatal(h, err)
		}
		names = append(names, h.Name)
	}
	if got := strings.Join(names, " "); got != "manifest version pki/ca.key etcd.db manifest" {
		t.Error(got)
	}
}

// Damage anywhere is found, and costs the part alone in which it is.
func TestDamage(t *testing.T) {
	good, _ := example(t)
	a, err := open(good)
	if err != nil {
		t.Fatal(err)
	}
	for at := 0; at < len(good); at += 61 {
		data := bytes.Clone(good)
		data[at] ^= 0x55
		got, err := open(data)
		if err != nil {
			t.Fatalf("byte %d: %v", at, err)
		}
		want := ""
		for i, p := range a.Parts {
			if int64(at) >= a.starts[i] && int64(at) < a.starts[i]+p.Size {
				want = p.Name
			}
		}
		names := ""
		for _, p := range got.Damaged() {
			names += p.Name
		}
		if names != want {
			t.Errorf("byte %d: damaged is %q, want %q", at, names, want)
		}
	}
	cut, err := open(good[:a.starts[2]+1000])
	if err != nil {
		t.Fatal(err)
	}
	if d := cut.Damaged(); len(d) != 1 || d[0].Name != Store {
		t.Errorf("cut short: %v", d)
	}
}

// Files that a restore must not write are none of a backup, nor is what is no backup.
func TestForeignFiles(t *testing.T) {
	for _, name := range []string{"../a", "/etc/passwd", "pki/../../a", "pki/", "etcd/member", "lock", "pki/.x"} {
		if _, err := PartOf(name, strings.NewReader("")); err == nil {
			t.Errorf("%q may be a part", name)
		}
		var b bytes.Buffer
		m := &Manifest{Format: Format, Parts: []Part{{Name: name}}}
		if err := Write(&b, m, func(string) (io.ReadCloser, error) { return io.NopCloser(strings.NewReader("")), nil }); err != nil {
			continue
		}
		if _, err := open(b.Bytes()); err == nil || !strings.Contains(err.Error(), "which no backup has") {
			t.Errorf("%q in a manifest: %v", name, err)
		}
	}
	var newer bytes.Buffer
	if err := Write(&newer, &Manifest{Format: Format + 1, Version: "v9"}, nil); err != nil {
		t.Fatal(err)
	}
	for want, data := range map[string][]byte{
		"no backup of fairlead": []byte("text"), "it is no backup": nil, "a newer fairlead has made it (v9": newer.Bytes(),
	} {
		if _, err := open(data); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func FuzzOpen(f *testing.F) {
	f.Add([]byte("manifest"))
	f.Fuzz(func(_ *testing.T, data []byte) {
		if a, err := open(data); err == nil {
			a.Damaged()
		}
	})
}
