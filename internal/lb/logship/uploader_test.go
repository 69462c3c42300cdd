package logship

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"

	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// What a child process of TestKilledInMidUpload is given, and no other.
const childVariable = "FAIRLEAD_TEST_LOGSHIP"

const bucket = "access-logs"

var good = Credentials{AccessKey: "AKIDEXAMPLE", SecretKey: "SECRET-wJalrXUtnFEMI"}

// s3 is a server of S3 in its own process: that of bench/peers/s3, or the program that FAIRLEAD_S3_SERVER names, which
// takes the same flags (bench/peers/versitygw).
type s3 struct {
	*testing.T
	program, cert string
	roots         *x509.CertPool
	at            string
}

func newS3(t *testing.T) *s3 {
	t.Helper()
	s := &s3{T: t, program: os.Getenv("FAIRLEAD_S3_SERVER"), cert: filepath.Join(t.TempDir(), "cert.pem"), roots: x509.NewCertPool()}
	if s.program == "" {
		s.program = process.Build(t, "bench/peers/s3", ".")
	}
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	s.must(err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "s3"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, k.Public(), k)
	s.must(err)
	key, err := x509.MarshalPKCS8PrivateKey(k)
	s.must(err)
	pair := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	s.roots.AppendCertsFromPEM(pair)
	s.must(os.WriteFile(s.cert, append(pair, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})...), 0o600))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	s.must(err)
	s.at = l.Addr().String()
	s.must(l.Close())
	return s
}

func (s *s3) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// start makes it answer at its address.
func (s *s3) start() {
	s.Helper()
	cmd := exec.CommandContext(s.Context(), s.program, "--listen", s.at, "--cert", s.cert, "--access-key", good.AccessKey,
		"--secret-key", good.SecretKey, "--bucket", bucket)
	cmd.Dir, cmd.Stderr = s.TempDir(), s.Output()
	s.must(cmd.Start())
	s.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	testbed.Until(s, "the server of S3", func() error {
		c, err := net.Dial("tcp", s.at)
		if err == nil {
			_ = c.Close()
		}
		return err
	})
}

func (s *s3) endpoint(at string) Endpoint {
	u, err := ParseEndpoint("https://" + at)
	s.must(err)
	return Endpoint{URL: u, Region: "us-east-1", Roots: s.roots}
}

// objects returns what is stored, by name.
func (s *s3) objects() map[string]string {
	s.Helper()
	e := s.endpoint(s.at)
	transport := e.transport()
	defer transport.CloseIdleConnections()
	client, err := e.client(transport, good)
	s.must(err)
	out := map[string]string{}
	for dirs := []string{""}; len(dirs) > 0; dirs = dirs[1:] { // the server of bench/peers/s3 takes no list without a delimiter
		for info := range client.ListObjects(s.Context(), bucket, minio.ListObjectsOptions{Prefix: dirs[0]}) {
			s.must(info.Err)
			if strings.HasSuffix(info.Key, "/") {
				dirs = append(dirs, info.Key)
				continue
			}
			object, err := client.GetObject(s.Context(), bucket, info.Key, minio.GetObjectOptions{})
			s.must(err)
			var r io.Reader = object
			if strings.HasSuffix(info.Key, ".gz") {
				r, err = gzip.NewReader(object)
				s.must(err)
			}
			text, err := io.ReadAll(r)
			s.must(err)
			out[info.Key] = string(text)
		}
	}
	return out
}

// spool is a directory of access logs, and what uploads it.
type spool struct {
	*testing.T
	dir      string
	log      bytes.Buffer // of the Uploader, to be read after it has ended
	problems sync.Map     // by Service
}

func (p *spool) write(f File, text string) {
	p.Helper()
	path := filepath.Join(p.dir, f.Name(5*time.Minute))
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		p.Fatal(err)
	}
	whole := filepath.Join(p.TempDir(), "file")
	if err := os.WriteFile(whole, []byte(text), 0o600); err != nil {
		p.Fatal(err)
	}
	if err := os.Rename(whole, path); err != nil {
		p.Fatal(err)
	}
}

// left returns the names of files, without directories.
func (p *spool) left() (out []string) {
	_ = filepath.WalkDir(p.dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			out = append(out, filepath.Base(path))
		}
		return nil
	})
	return out
}

func (p *spool) problem(n Owner) string {
	v, _ := p.problems.Load(n.Service)
	s, _ := v.(string)
	return s
}

// run returns an Uploader that works until the test ends, or stop is called.
func (p *spool) run(e Endpoint, keep bool) (u *Uploader, stop func()) {
	u = New(Options{
		Log: slog.New(slog.NewTextHandler(&p.log, nil)), Dir: p.dir, Node: "n1", Endpoint: e, Keep: keep, Finish: func(time.Time) {},
		Report: func(n svc.Name, problem string) { p.problems.Store(n, problem) }, Period: 10 * time.Millisecond, Retry: 10 * time.Millisecond,
	})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { u.Run(ctx) })
	stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	p.Cleanup(stop)
	return u, stop
}

func (p *spool) await(what string, ok func() bool) {
	p.Helper()
	testbed.Until(p, what, func() error {
		if !ok() {
			return fmt.Errorf("files %q, problems %q", p.left(), p.problem(web))
		}
		return nil
	})
}

var (
	web  = OwnerOf(svc.Name{Namespace: "shop", Name: "web"}, "uid")
	then = time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)
	past = File{Node: "n1", Owner: web, End: then}
)

// Files are stored under names as those of AWS when they are complete, and removed then, not before: neither while the
// endpoint is away or not the right one, nor while the credentials are wrong (behaviours 122 to 125).
func TestUpload(t *testing.T) {
	s, p := newS3(t), &spool{T: t, dir: t.TempDir()}
	application, second := past, past
	application.Application, second.Part = true, 1
	p.write(past, "one\n")
	p.write(second, "two\n")
	p.write(application, "three\n")
	later := past
	later.End = time.Now().Add(time.Hour)
	p.write(later, "not complete\n")
	p.write(File{Node: "n2", Owner: web, End: then}, "another node's\n")
	p.write(File{Node: "n1", Owner: OwnerOf(svc.Name{Namespace: "shop", Name: "local"}, "uid"), End: then}, "without a bucket\n")
	to := map[Owner]Destination{web: {Bucket: bucket, Prefix: "logs/prod", Credentials: good}}

	u, stop := p.run(s.endpoint(s.at), false)
	u.Set(to)
	p.await("a failure", func() bool {
		return p.problem(web) == "cannot store access logs in bucket access-logs: the endpoint cannot be reached; retrying"
	})
	s.start()
	p.await("the files", func() bool { return len(p.left()) == 3 && p.problem(web) == "" })
	const dir, name = "logs/prod/AWSLogs/shop/elasticloadbalancing/us-east-1/2026/01/02/", "shop_elasticloadbalancing_us-east-1_"
	var got []string
	for key, text := range s.objects() {
		base, sum, _ := strings.Cut(key, "_n1_")
		if _, ext, _ := strings.Cut(sum, "."); len(sum) != 16+1+len(ext) {
			t.Errorf("%s", key)
		} else {
			got = append(got, base+"."+ext+" "+text)
		}
	}
	slices.Sort(got)
	if want := []string{
		dir + name + "app.web_20260102T0000Z.log.gz three\n", dir + name + "web_20260102T0000Z.log one\n",
		dir + name + "web_20260102T0000Z.log two\n",
	}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if u.Uploaded() != 3 || u.Failed() == 0 {
		t.Errorf("%d uploaded, %d failed", u.Uploaded(), u.Failed())
	}

	// Another one's credentials are of no use, the reason has a code alone; the bucket of another one is not there.
	for want, d := range map[string]Destination{
		"SignatureDoesNotMatch": {Bucket: bucket, Credentials: Credentials{AccessKey: good.AccessKey, SecretKey: "SECRET-other"}},
		"NoSuchBucket":          {Bucket: "other", Credentials: good},
	} {
		u.Set(map[Owner]Destination{web: d})
		p.await(want, func() bool {
			if len(p.left()) < 4 { // as an upload that had begun before may have stored it
				p.write(past, "four\n")
			}
			return p.problem(web) == "cannot store access logs in bucket "+d.Bucket+": the endpoint answers "+want+"; retrying"
		})
	}
	u.Set(nil) // what is left goes where it went before
	u.Set(to)
	u.Set(nil)
	p.await("the files of a Service that has gone", func() bool { return len(p.left()) == 3 })
	stop()

	p.write(past, "five\n")
	stranger := s.endpoint(s.at)
	stranger.Roots = x509.NewCertPool()
	u, stop = p.run(stranger, true)
	u.Set(to)
	p.await("a server that is not verified", func() bool { return strings.Contains(p.problem(web), "cannot be reached") })
	stop()
	u, stop = p.run(s.endpoint(s.at), true)
	u.Set(to)
	p.await("the file that is kept", func() bool { return slices.Contains(p.left(), "n1_shop_web_"+web.Mark+"_20260102T0000Z.uploaded.log") })
	before := len(s.objects())
	stop()
	if before != 5 || len(p.left()) != 4 {
		t.Errorf("%d objects, files %q", before, p.left())
	}
	storeOfOthers(s, p)
	if strings.Contains(p.log.String(), "SECRET") || !strings.Contains(p.log.String(), "cannot store access logs") {
		t.Errorf("%s", &p.log)
	}
}

// storeOfOthers looks at files of another Service that had the name before, and of one whose credentials were withdrawn: they stay.
func storeOfOthers(s *s3, p *spool) {
	s.Helper()
	u, stop := p.run(s.endpoint(s.at), false)
	defer stop()
	earlier, present, other := past, past, past
	earlier.Owner = OwnerOf(web.Service, "earlier")
	other.Owner = OwnerOf(svc.Name{Namespace: "shop", Name: "other"}, "uid")
	d := Destination{Bucket: bucket, Credentials: good}
	p.write(earlier, "earlier\n")
	u.Set(map[Owner]Destination{web: d})
	round := func(of File) {
		s.Helper()
		before := len(p.left())
		p.write(of, "six\n")
		p.await("a file of "+of.Service.String(), func() bool { return len(p.left()) <= before })
	}
	round(present)
	u.Set(map[Owner]Destination{web: {}, other.Owner: d})
	p.write(present, "withdrawn\n")
	for range 2 { // the second one is looked for after a whole round
		round(other)
	}
	for _, f := range []File{earlier, present} {
		if _, err := os.Stat(filepath.Join(p.dir, f.Name(5*time.Minute))); err != nil {
			s.Error(err)
		}
	}
}

// stall passes on what a client sends, but for the last bytes of what is larger than a limit.
func stall(t *testing.T, to string, limit int64) (at string, stalled <-chan struct{}) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	reached := make(chan struct{})
	var once atomic.Bool
	var running sync.WaitGroup
	t.Cleanup(func() { _ = l.Close(); running.Wait() })
	running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			running.Go(func() {
				defer c.Close()
				up, err := net.Dial("tcp", to)
				if err != nil {
					return
				}
				defer up.Close()
				running.Go(func() { _, _ = io.Copy(c, up) })
				if _, err := io.CopyN(up, c, limit); err == nil && once.CompareAndSwap(false, true) {
					close(reached)
					_, _ = io.Copy(io.Discard, c)
				}
			})
		}
	})
	return l.Addr().String(), reached
}

// A process that is killed while it uploads has removed nothing; the next one stores the file, once.
func TestKilledInMidUpload(t *testing.T) {
	if at := os.Getenv(childVariable); at != "" {
		dir, rest, _ := strings.Cut(at, " ")
		address, cert, _ := strings.Cut(rest, " ")
		s, p := &s3{T: t, roots: x509.NewCertPool()}, &spool{T: t, dir: dir}
		text, err := os.ReadFile(cert)
		s.must(err)
		s.roots.AppendCertsFromPEM(text)
		u, _ := p.run(s.endpoint(address), false)
		u.Set(map[Owner]Destination{web: {Bucket: bucket, Credentials: good}})
		<-time.After(2 * testbed.Patience) // the parent kills it
		t.Fatal("not killed")
	}
	s, p := newS3(t), &spool{T: t, dir: t.TempDir()}
	s.start()
	text := strings.Repeat("a line\n", 200_000)
	p.write(past, text)
	at, stalled := stall(t, s.at, 1<<20)
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilledInMidUpload$")
	child.Env = append(os.Environ(), childVariable+"="+strings.Join([]string{p.dir, at, s.cert}, " "))
	s.must(child.Start())
	select {
	case <-stalled:
	case <-time.After(testbed.Patience):
		t.Error("nothing is uploaded")
	}
	s.must(child.Process.Kill())
	_ = child.Wait()
	if got, left := s.objects(), p.left(); len(got) != 0 || len(left) != 1 {
		t.Fatalf("%d objects, files %q", len(got), left)
	}
	for range 2 { // as if it had been killed between storing and removing
		u, stop := p.run(s.endpoint(s.at), false)
		u.Set(map[Owner]Destination{web: {Bucket: bucket, Credentials: good}})
		p.await("the file", func() bool { return len(p.left()) == 0 })
		stop()
		p.write(past, text)
	}
	objects := s.objects()
	for _, got := range objects {
		if got != text || len(objects) != 1 {
			t.Errorf("%d objects, %d bytes of %d", len(objects), len(got), len(text))
		}
	}
	if len(objects) == 0 {
		t.Error("nothing is stored")
	}
}

func TestNames(t *testing.T) {
	for _, f := range []File{past, {Node: "n1.example", Owner: web, End: then, Application: true, Part: 2}} {
		name := f.Name(5 * time.Minute)
		if dir, base := filepath.Split(name); dir != "shop/web/2026/01/01/" {
			t.Errorf("%s", name)
		} else if got, ok := parse(base); !ok || got != f {
			t.Errorf("%s: %+v, want %+v", base, got, f)
		}
	}
	for _, bad := range []string{"", "a.log", "n1_shop_web_0a_20260102T0000Z.uploaded.log", "n1_shop_web_0a_2026.log",
		"n1_shop_web_20260102T0000Z.log", ".packed123"} {
		if f, ok := parse(bad); ok {
			t.Errorf("%q: %+v", bad, f)
		}
	}
	for _, bad := range []string{"ftp://a", "https://", "https://a/b", "https://u:p@a", "https://a?x=y", "a:9000"} {
		if u, err := ParseEndpoint(bad); err == nil {
			t.Errorf("%q: %v", bad, u)
		}
	}
}
