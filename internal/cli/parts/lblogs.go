package parts

import (
	"crypto/x509"
	"fmt"
	"os"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/lb/front"
	"github.com/fairlead/fairlead/internal/lb/logship"
	"github.com/fairlead/fairlead/internal/lb/proxied/accesslog"
)

// logUploadFlags say where access logs of load balancers are uploaded to. There are no credentials among them: those are
// of each namespace.
type logUploadFlags struct {
	endpoint, region, caFile string
	keep                     bool
}

func (f *logUploadFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.endpoint, "lb-access-log-endpoint", "",
		"server of S3, https://HOST[:PORT], that access logs go to if a Service names a bucket; the credentials for it are in a Secret "+
			"of the Service's namespace (docs/loadbalancer.md)")
	flags.StringVar(&f.region, "lb-access-log-region", "us-east-1", "region that requests to that server are signed for")
	flags.StringVar(&f.caFile, "lb-access-log-ca-file", "", "authorities of that server's certificate (default: the system's)")
	flags.BoolVar(&f.keep, "lb-access-log-keep", false, "keep access logs in their directory when they have been uploaded")
}

func (f *logUploadFlags) check(dir string) error {
	if f.endpoint == "" {
		return nil
	}
	if _, err := logship.ParseEndpoint(f.endpoint); err != nil {
		return base.Usagef("--lb-access-log-endpoint %.100q: %v", f.endpoint, err)
	}
	if dir == "" {
		return base.Usagef("--lb-access-log-endpoint needs --lb-access-logs: logs wait there until they are uploaded")
	}
	if dir == accesslog.Standard {
		return base.Usagef("--lb-access-log-endpoint and --lb-access-logs %s: only files are uploaded", dir)
	}
	return nil
}

// options returns where access logs are uploaded to, nil if they are not.
func (f *logUploadFlags) options() (*front.LogUpload, error) {
	if f.endpoint == "" {
		return nil, nil
	}
	u, err := logship.ParseEndpoint(f.endpoint)
	if err != nil {
		return nil, err
	}
	roots, err := readRoots("lb-access-log-ca-file", f.caFile)
	if err != nil {
		return nil, err
	}
	return &front.LogUpload{Endpoint: logship.Endpoint{URL: u, Region: f.region, Roots: roots}, Keep: f.keep}, nil
}

// readRoots reads the file of a flag with authorities, nil without one.
func readRoots(flag, path string) (*x509.CertPool, error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("--%s: %w", flag, err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("--%s %s has no certificate", flag, path)
	}
	return roots, nil
}
