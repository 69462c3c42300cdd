package accesslog

import (
	"encoding/json"
	"net/netip"
	"strings"
	"time"
	"unicode/utf8"
)

// jsonLine is a line of format JSON. Names are ELB's where they mean the same; seconds and bytes are numbers. What
// is not known is left out.
type jsonLine struct {
	Time       time.Time      `json:"time"`
	Namespace  string         `json:"namespace"`
	Service    string         `json:"service"`
	Client     netip.AddrPort `json:"client"`
	Endpoint   string         `json:"endpoint,omitempty"`
	Kind       string         `json:"kind"`
	Began      *time.Time     `json:"began,omitempty"`
	Method     string         `json:"method,omitempty"`
	URL        string         `json:"url,omitempty"`
	Protocol   string         `json:"protocol,omitempty"`
	Status     int            `json:"status,omitempty"`
	PodStatus  int            `json:"endpoint_status,omitempty"`
	Before     *float64       `json:"request_processing_seconds,omitempty"`
	During     *float64       `json:"endpoint_processing_seconds,omitempty"`
	After      *float64       `json:"response_processing_seconds,omitempty"`
	Received   int64          `json:"received_bytes"`
	Sent       int64          `json:"sent_bytes"`
	Agent      string         `json:"user_agent,omitempty"`
	RequestID  string         `json:"request_id,omitempty"`
	Domain     string         `json:"tls_server_name,omitempty"`
	TLSVersion string         `json:"tls_version,omitempty"`
	TLSSuite   string         `json:"tls_cipher,omitempty"`
	Subject    string         `json:"tls_client,omitempty"`
}

// json returns the line as an object of JSON. What a client has sent cannot end the line or the object.
func (e *Entry) json() string {
	seconds := func(d time.Duration) *float64 {
		if d < 0 {
			return nil
		}
		return new(d.Seconds())
	}
	j := jsonLine{
		Time: e.At.UTC(), Namespace: e.Owner.Service.Namespace, Service: e.Owner.Service.Name, Client: e.Client, Kind: e.Kind,
		Status: e.Status, PodStatus: e.PodStatus, Before: seconds(e.Before), During: seconds(e.During), After: seconds(e.After),
		Received: e.Received, Sent: e.Sent, Agent: bounded(e.Agent), RequestID: bounded(e.RequestID), Domain: bounded(e.Domain),
		TLSVersion: e.Proto, TLSSuite: e.Suite, Subject: bounded(e.Subject),
	}
	if j.Kind == "" {
		if j.Kind = "tcp"; e.Proto != "" {
			j.Kind = "tls"
		}
	}
	if e.Pod.IsValid() {
		j.Endpoint = e.Pod.String()
	}
	if !e.Began.IsZero() {
		j.Began = new(e.Began.UTC())
	}
	if method, rest, ok := strings.Cut(bounded(e.Request), " "); ok {
		j.Method = method
		if i := strings.LastIndexByte(rest, ' '); i >= 0 {
			j.URL, j.Protocol = rest[:i], rest[i+1:]
		} else {
			j.URL = rest // it was cut
		}
	}
	line, err := json.Marshal(j)
	if err != nil { // of a time beyond the year 9999
		return ""
	}
	return string(line) + "\n"
}

// bounded returns as much of a text as a line has. Bytes that are not UTF-8 become U+FFFD.
func bounded(s string) string {
	if len(s) > maxLogged {
		s = s[:maxLogged]
	}
	if !utf8.ValidString(s) {
		s = strings.ToValidUTF8(s, "\uFFFD")
	}
	return s
}
