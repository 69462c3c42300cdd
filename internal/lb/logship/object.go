package logship

import (
	"compress/gzip"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

// Credentials are for a bucket. They are never written to a log.
type Credentials struct {
	AccessKey, SecretKey string
	// Token is that of a session, empty for none.
	Token string
}

// String returns nothing of the credentials.
func (Credentials) String() string { return "credentials" }

// GoString returns nothing of the credentials.
func (c Credentials) GoString() string { return c.String() }

// LogValue returns nothing of the credentials.
func (c Credentials) LogValue() slog.Value { return slog.StringValue(c.String()) }

// Endpoint is a server of S3.
type Endpoint struct {
	// URL has a scheme, https or http, a host, and perhaps a port.
	URL *url.URL
	// Region is what requests are signed for, and a part of the objects' names.
	Region string
	// Roots are the authorities that the server's certificate is verified with, nil for the system's.
	Roots *x509.CertPool
}

// ParseEndpoint reads the URL of an Endpoint.
func ParseEndpoint(s string) (*url.URL, error) {
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Hostname() == "" || strings.Trim(u.Path, "/") != "" || u.User != nil ||
		u.RawQuery != "" || u.Fragment != "" {
		return nil, errors.New("it must be https://HOST[:PORT] (or http://), without a path")
	}
	return u, nil
}

// Bounds of an upload: nothing else ends one to a server that is silent.
const (
	connectTimeout = 10 * time.Second
	answerTimeout  = time.Minute
	// leastRate is how many bytes a second have to go through.
	leastRate = 64 << 10
	// maxPerEndpoint is how many uploads run at a time.
	maxPerEndpoint = 4
)

func (e Endpoint) transport() *http.Transport {
	return &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         (&net.Dialer{Timeout: connectTimeout}).DialContext,
		TLSHandshakeTimeout: connectTimeout, ResponseHeaderTimeout: answerTimeout, ExpectContinueTimeout: time.Second,
		IdleConnTimeout: time.Minute, MaxIdleConnsPerHost: maxPerEndpoint, MaxResponseHeaderBytes: 64 << 10, DisableCompression: true,
		TLSClientConfig: &tls.Config{RootCAs: e.Roots, MinVersion: tls.VersionTLS12},
	}
}

// client returns what speaks S3 with credentials.
func (e Endpoint) client(t http.RoundTripper, c Credentials) (*minio.Client, error) {
	return minio.New(e.URL.Host, &minio.Options{
		Creds: credentials.NewStaticV4(c.AccessKey, c.SecretKey, c.Token), Secure: e.URL.Scheme == "https", Region: e.Region,
		Transport: t, MaxRetries: 1,
	})
}

// key returns the name of the object that a file is stored as, laid out as by AWS's load balancers: the namespace
// is in place of the account, the node in place of the address. The random part comes from the content, so that the
// same file has the same name when it is uploaded again, and other lines never replace it:
// https://docs.aws.amazon.com/elasticloadbalancing/latest/classic/access-log-collection.html#access-log-file-format
func key(prefix, region string, f File, sum []byte) string {
	account, service, ext := f.Service.Namespace, f.Service.Name, ".log"
	if f.Application {
		service, ext = "app."+service, ".log.gz"
	}
	name := strings.Join([]string{account, "elasticloadbalancing", region, service, f.End.UTC().Format(endFormat), f.Node,
		hex.EncodeToString(sum[:8])}, "_") + ext
	return path.Join(prefix, "AWSLogs", account, "elasticloadbalancing", region, f.End.UTC().Format("2006/01/02"), name)
}

// store uploads a file. It may have been uploaded before.
func (u *Uploader) store(ctx context.Context, client *minio.Client, d Destination, f spooled) error {
	file, err := os.Open(f.path)
	if errors.Is(err, os.ErrNotExist) { // it was the oldest, and there were too many
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	hash := sha256.New()
	size, err := io.Copy(hash, file)
	if err == nil {
		_, err = file.Seek(0, io.SeekStart)
	}
	if err != nil || size == 0 {
		return err
	}
	o := minio.PutObjectOptions{ContentType: "text/plain", DisableMultipart: true, SendContentMd5: true}
	if f.Application {
		packed, err := pack(file, filepath.Dir(f.path))
		if err != nil {
			return err
		}
		defer packed.Close()
		if size, err = packed.Seek(0, io.SeekEnd); err == nil {
			_, err = packed.Seek(0, io.SeekStart)
		}
		if err != nil {
			return err
		}
		file, o.ContentType = packed, "application/x-gzip"
	}
	ctx, cancel := context.WithTimeout(ctx, answerTimeout+time.Duration(size/leastRate)*time.Second)
	defer cancel()
	// The file is wrapped: what is closed, and when, is not the library's business.
	name := key(d.Prefix, u.endpoint.Region, f.File, hash.Sum(nil))
	_, err = client.PutObject(ctx, d.Bucket, name, io.NewSectionReader(file, 0, size), size, o)
	return err
}

// pack returns a file with the content of another one, compressed. It has no name, so that it is gone when it is closed.
func pack(from io.Reader, dir string) (*os.File, error) {
	to, err := os.CreateTemp(dir, ".packed")
	if err != nil {
		return nil, err
	}
	_ = os.Remove(to.Name())
	z := gzip.NewWriter(to)
	_, err = io.Copy(z, from)
	if err = errors.Join(err, z.Close()); err != nil {
		_ = to.Close()
		return nil, err
	}
	return to, nil
}

// reason returns why an upload has failed, for readers of a Service's Events: the endpoint's error code, not its text or
// address.
func reason(err error) string {
	var r minio.ErrorResponse
	errors.As(err, &r)
	plain := func(c rune) bool { return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') }
	var file *os.PathError
	switch {
	case r.StatusCode != 0 && r.Code != "" && len(r.Code) <= 64 && !strings.ContainsFunc(r.Code, plain):
		return fmt.Sprintf("the endpoint answers %s", r.Code)
	case r.StatusCode != 0:
		return fmt.Sprintf("the endpoint answers with status %d", r.StatusCode)
	case errors.As(err, &file):
		return "a file cannot be read"
	default:
		return "the endpoint cannot be reached"
	}
}
