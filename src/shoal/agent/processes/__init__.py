"""Member processes: warm process, zygote, process trees and orphans."""
